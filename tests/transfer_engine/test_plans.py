# SPDX-License-Identifier: Apache-2.0
"""Batches that are checked once and posted many times."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.patterns import fill, pattern

from moonpool.transfer_engine import (
    ArgumentTypeError,
    BatchError,
    InvalidArgumentError,
    OutOfRangeError,
    Plan,
    RegionReleasedError,
)

BLOCK = 256
COUNT = 64


@pytest.fixture
def plan(pair: Pair) -> Plan:
    """Block `i` of the local region with block `COUNT - 1 - i` of the remote one."""
    blocks = np.arange(COUNT) * BLOCK
    return pair.client.prepare(pair.peer, pair.local, pair.remote, blocks, blocks[::-1], BLOCK)


def block(data: Any, index: int) -> bytes:
    return bytes(memoryview(data)[index * BLOCK : (index + 1) * BLOCK])


def test_posting_all_of_it(pair: Pair, plan: Plan) -> None:
    fill(pair.region)
    assert len(plan) == COUNT
    transfer = pair.client.post(plan).wait()
    assert len(transfer) == COUNT
    assert all(block(pair.local, i) == block(pattern(1 << 16), COUNT - 1 - i) for i in range(COUNT))
    fill(pair.local, seed=4)
    pair.client.post(plan, op="write").wait()
    assert all(block(pair.region, COUNT - 1 - i) == block(pattern(1 << 16, seed=4), i) for i in range(COUNT))
    assert repr(plan) == f"<Plan of {COUNT} items with {pair.peer!r}>"


@pytest.mark.parametrize(
    "indices",
    [
        [3, 60, 0],
        np.array([3, 60, 0]),
        np.array([3, 60, 0], dtype=np.int32),
        np.array([0, 9, 60, 9, 3])[::-2],
        (3,),
        3,
        range(10, 20, 3),
        [5, 5, 5],
    ],
)
def test_posting_some_of_it(pair: Pair, plan: Plan, indices: Any) -> None:
    fill(pair.region)
    wanted = [int(index) for index in np.atleast_1d(indices)]
    transfer = pair.client.post(plan, indices).wait()
    assert len(transfer) == len(wanted)
    for index in range(COUNT):
        expected = block(pattern(1 << 16), COUNT - 1 - index) if index in wanted else bytes(BLOCK)
        assert block(pair.local, index) == expected


@pytest.mark.parametrize("indices", [[COUNT], [-1], [0, 1 << 40], np.array([COUNT + 1]), 1 << 62])
def test_an_index_outside_the_plan(pair: Pair, plan: Plan, indices: Any) -> None:
    with pytest.raises((OutOfRangeError, BatchError), match="outside the plan") as caught:
        pair.client.post(plan, indices).wait()
    assert caught.value.hint
    assert caught.value.code == "OUT_OF_RANGE"


@pytest.mark.parametrize("indices", ["0", 0.5, [0.5], np.zeros((2, 2), dtype=int), object()])
def test_indices_of_a_wrong_kind(pair: Pair, plan: Plan, indices: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="indices"):
        pair.client.post(plan, indices)


def test_no_indices_at_all(pair: Pair, plan: Plan) -> None:
    with pytest.raises(InvalidArgumentError):
        pair.client.post(plan, [])


@pytest.mark.parametrize("op", ["put", "READ", None, 1])
def test_an_unknown_operation(pair: Pair, plan: Plan, op: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="'read' or 'write'"):
        pair.client.post(plan, op=op)


def test_what_is_no_plan(pair: Pair, plan: Plan, open_engine: OpenEngine) -> None:
    with pytest.raises(ArgumentTypeError, match="plan"):
        pair.client.post([0, 1])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="another engine"):
        open_engine(listen=None).post(plan)
    with pytest.raises(TypeError, match="prepare"):
        Plan()


def test_a_plan_needs_lengths(pair: Pair) -> None:
    with pytest.raises(InvalidArgumentError, match="lengths"):
        pair.client.prepare(pair.peer, pair.local, pair.remote, 0, 0, None)  # type: ignore[call-overload]


def test_a_plan_from_a_list_of_items(pair: Pair) -> None:
    fill(pair.region)
    second = pair.client.allocate(4096)
    plan = pair.client.prepare(pair.peer, [(pair.local, 0, pair.remote, 64, 64), (second, 8, pair.remote, 0, 32)])
    pair.client.post(plan, [1]).wait()
    assert bytes(memoryview(second)[8:40]) == pattern(32)
    assert not any(bytes(pair.local))
    pair.client.post(plan).wait()
    assert bytes(memoryview(pair.local)[:64]) == pattern(128)[64:]


def test_a_plan_with_a_bad_item(pair: Pair) -> None:
    """A plan is for many posts, so it is refused as a whole; the error names the item."""
    with pytest.raises(OutOfRangeError, match="item 1") as caught:
        pair.client.prepare(pair.peer, pair.local, pair.remote, 0, [0, 1 << 20, 64], 32)
    assert caught.value.item == 1


def test_a_plan_outlives_the_callers_arrays_and_handles(pair: Pair) -> None:
    fill(pair.region)
    offsets = np.arange(4) * 64
    plan = pair.client.prepare(pair.peer, pair.local, pair.peer.regions["kv"], offsets, offsets, 64)
    offsets[:] = -1
    del offsets
    pair.client.post(plan).wait()
    assert bytes(memoryview(pair.local)[:256]) == pattern(256)


@pytest.mark.parametrize("side", ["local", "region"])
def test_a_plan_does_not_hinder_a_release_and_sees_it(pair: Pair, plan: Plan, side: str) -> None:
    pair.client.post(plan).wait()
    getattr(pair, side).release()
    with pytest.raises(RegionReleasedError):
        pair.client.post(plan, [0]).wait()


def test_posting_from_several_threads(pair: Pair, plan: Plan) -> None:
    fill(pair.region)
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for _ in range(50):
                pair.client.post(plan, np.arange(start, COUNT, 4)).wait()
        except BaseException as error:  # noqa: BLE001 - collected for the assertion
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(block(pair.local, i) == block(pattern(1 << 16), COUNT - 1 - i) for i in range(COUNT))


def test_options_of_a_post(pair: Pair, plan: Plan) -> None:
    transfer = pair.client.post(plan, [0, 1], "write", notify=b"posted", digest=True).wait()
    assert transfer.digests is not None
    assert len(transfer.digests) == 2
    assert [note.payload for note in pair.server.notifications(90.0)] == [b"posted"]
    with pytest.raises(TimeoutError):
        pair.client.post(plan, deadline=-1).wait()
