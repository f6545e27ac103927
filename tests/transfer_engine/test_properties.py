# SPDX-License-Identifier: Apache-2.0
"""Random batches against a model in numpy: packing of descriptors, merging of neighbours, slicing over lanes.

The regions are small and the batches dense, so that items touch, overlap on the source side, and cross slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import PATIENT
from engine_testing.patterns import fill, pattern
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.transfer_engine import (
    BatchError,
    OutOfRangeError,
    Peer,
    Region,
    RemoteRegion,
    Status,
    Transfer,
    TransferEngine,
    digest,
)

NBYTES = 300_000
REGIONS = 2


@dataclass
class World:
    """Two engines with `REGIONS` regions each. Shared by all examples, which set the bytes they need."""

    client: TransferEngine
    peer: Peer
    locals: list[Region]
    regions: list[Region]
    remotes: list[RemoteRegion]

    def reset(self) -> None:
        for index in range(REGIONS):
            fill(self.locals[index], seed=10 + index)
            fill(self.regions[index], seed=20 + index)

    def bytes_of(self, side: list[Region]) -> list[np.ndarray]:
        return [np.frombuffer(region, dtype=np.uint8) for region in side]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not per test here: the engines are shared, and open what they need when they first need it."""


@pytest.fixture(scope="module", params=["tcp", "local"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    # The smallest slice, so that these small batches already travel in pieces over several lanes.
    options: dict[str, Any] = {"transports": request.param, "slice_bytes": 65_536, "lanes": 3, **PATIENT}
    with TransferEngine("server", **options) as server, TransferEngine("client", listen=None, **options) as client:
        regions = [server.allocate(NBYTES, name=str(index)) for index in range(REGIONS)]
        peer = client.connect(server.address or "")
        locals_ = [client.allocate(NBYTES) for _ in range(REGIONS)]
        remotes = [peer.regions.wait(str(index), 10.0) for index in range(REGIONS)]
        yield World(client, peer, locals_, regions, remotes)


@dataclass(frozen=True)
class Item:
    """Source and destination as (region, offset); the destinations of a batch are disjoint."""

    source_region: int
    source: int
    target_region: int
    target: int
    length: int


@st.composite
def batches(draw: st.DrawFn, regions: int = REGIONS) -> list[Item]:
    """Items that fill disjoint stretches of the targets from sources anywhere, in any order.

    Stretches often follow each other without a gap, and often their sources do too: then they can be merged.
    """
    items = []
    for target_region in range(regions):
        at = draw(st.integers(0, 300))
        neighbour = draw(st.integers(0, NBYTES - 1))
        for _ in range(draw(st.integers(0, 12))):
            length = draw(st.one_of(st.integers(1, 64), st.integers(1, 9000), st.integers(1, 150_000), st.just(4096)))
            if at + length > NBYTES:
                break
            source = neighbour if draw(st.booleans()) else draw(st.integers(0, NBYTES - 1))
            source = min(source, NBYTES - length)
            items.append(Item(draw(st.integers(0, regions - 1)), source, target_region, at, length))
            neighbour = source + length
            at += length + draw(st.sampled_from([0, 0, 0, 1, 100]))
    return draw(st.permutations(items))


def model(items: list[Item], sources: list[np.ndarray], targets: list[np.ndarray]) -> list[np.ndarray]:
    expected = [target.copy() for target in targets]
    for item in items:
        expected[item.target_region][item.target : item.target + item.length] = sources[item.source_region][
            item.source : item.source + item.length
        ]
    return expected


def submit(world: World, op: str, items: list[Item], **options: bool) -> Transfer:
    if op == "read":
        rows = [
            (world.locals[i.target_region], i.target, world.remotes[i.source_region], i.source, i.length) for i in items
        ]
        return world.client.read(world.peer, rows, **options)
    rows = [
        (world.locals[i.source_region], i.source, world.remotes[i.target_region], i.target, i.length) for i in items
    ]
    return world.client.write(world.peer, rows, **options)


def sides(world: World, op: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the bytes of the sources and of the targets."""
    ours, theirs = world.bytes_of(world.locals), world.bytes_of(world.regions)
    return (theirs, ours) if op == "read" else (ours, theirs)


def check(world: World, op: str, items: list[Item], expected: list[np.ndarray]) -> None:
    sources, targets = sides(world, op)
    for index in range(REGIONS):
        np.testing.assert_array_equal(targets[index], expected[index])
        seed = (20 if op == "read" else 10) + index
        assert sources[index].tobytes() == pattern(NBYTES, seed), "the source was written"


@settings(max_examples=120)
@given(items=batches().filter(bool), op=st.sampled_from(["read", "write"]), with_digests=st.booleans())
def test_a_batch_moves_what_the_model_moves(world: World, items: list[Item], op: str, with_digests: bool) -> None:
    world.reset()
    sources, targets = sides(world, op)
    expected = model(items, sources, targets)
    transfer = submit(world, op, items, digest=with_digests).wait()
    assert transfer.statuses == bytes(len(items))
    check(world, op, items, expected)
    if with_digests:
        assert transfer.digests is not None
        assert list(transfer.digests) == [
            digest(sources[item.source_region][item.source : item.source + item.length]) for item in items
        ]


@settings(max_examples=60)
@given(
    items=batches(regions=1).filter(bool),
    op=st.sampled_from(["read", "write"]),
    dtypes=st.tuples(*[st.sampled_from([np.int64, np.int32, np.uint32, np.uint64])] * 3),
    step=st.sampled_from([1, 2, -1]),
)
def test_arrays_of_any_layout_move_the_same(
    world: World, items: list[Item], op: str, dtypes: tuple[type, type, type], step: int
) -> None:
    world.reset()
    sources, targets = sides(world, op)
    expected = model(items, sources, targets)
    # One region on each side, so that the array form can name it.
    columns = []
    for dtype, values in zip(
        dtypes, ([i.source for i in items], [i.target for i in items], [i.length for i in items]), strict=True
    ):
        wide = np.zeros(len(items) * abs(step), dtype=dtype)
        wide[::step] = values
        columns.append(wide[::step])
    source, target, length = columns
    local, remote = (target, source) if op == "read" else (source, target)
    getattr(world.client, op)(world.peer, world.locals[0], world.remotes[0], local, remote, length).wait()
    check(world, op, items, expected)


@settings(max_examples=60)
@given(data=st.data(), items=batches().filter(bool), op=st.sampled_from(["read", "write"]))
def test_indices_into_a_plan_move_the_same(world: World, data: st.DataObject, items: list[Item], op: str) -> None:
    world.reset()
    chosen = data.draw(st.lists(st.integers(0, len(items) - 1), min_size=1, max_size=20, unique=True))
    if op == "read":
        rows = [
            (world.locals[i.target_region], i.target, world.remotes[i.source_region], i.source, i.length) for i in items
        ]
    else:
        rows = [
            (world.locals[i.source_region], i.source, world.remotes[i.target_region], i.target, i.length) for i in items
        ]
    plan = world.client.prepare(world.peer, rows)
    sources, targets = sides(world, op)
    subset = [items[index] for index in chosen]
    expected = model(subset, sources, targets)
    for _ in range(2):
        transfer = world.client.post(plan, np.array(chosen), "read" if op == "read" else "write").wait()
        assert len(transfer) == len(chosen)
    check(world, op, subset, expected)


@settings(max_examples=60)
@given(data=st.data(), items=batches().filter(bool), op=st.sampled_from(["read", "write"]))
def test_bad_items_change_nothing_and_hide_nothing(
    world: World, data: st.DataObject, items: list[Item], op: str
) -> None:
    world.reset()
    bad = [
        Item(0, data.draw(st.integers(-5, NBYTES + 5)), 0, data.draw(st.integers(-5, NBYTES + 5)), length)
        for length in data.draw(
            st.lists(st.sampled_from([0, -1, NBYTES + 1, NBYTES + 6, 1 << 62]), min_size=1, max_size=5)
        )
    ]
    mixed = data.draw(st.permutations([(item, True) for item in items] + [(item, False) for item in bad]))
    sources, targets = sides(world, op)
    expected = model(items, sources, targets)
    transfer = submit(world, op, [item for item, _ in mixed])
    with pytest.raises(BatchError) as caught:
        transfer.wait()
    assert list(transfer.statuses) == [Status.OK if good else Status.OUT_OF_RANGE for _, good in mixed]
    assert caught.value.failed == [index for index, (_, good) in enumerate(mixed) if not good]
    check(world, op, items, expected)


@settings(max_examples=60)
@given(
    op=st.sampled_from(["read", "write"]),
    local=st.integers(-NBYTES, 2 * NBYTES) | st.sampled_from([-(1 << 63), (1 << 63) - 1]),
    remote=st.integers(-NBYTES, 2 * NBYTES) | st.sampled_from([-(1 << 63), (1 << 63) - 1]),
    length=st.integers(-10, 2 * NBYTES) | st.sampled_from([-(1 << 63), (1 << 63) - 1]),
)
def test_exactly_the_items_inside_both_regions_are_accepted(
    world: World, op: str, local: int, remote: int, length: int
) -> None:
    inside = length > 0 and all(offset >= 0 and offset + length <= NBYTES for offset in (local, remote))
    call = getattr(world.client, op)
    if inside:
        call(world.peer, world.locals[0], world.remotes[0], local, remote, length).wait()
    else:
        with pytest.raises(OutOfRangeError):
            call(world.peer, world.locals[0], world.remotes[0], local, remote, length)
