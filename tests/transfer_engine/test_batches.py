# SPDX-License-Identifier: Apache-2.0
"""Batches: the forms in which offsets and lengths may come, and the status of each item."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import Pair
from engine_testing.patterns import fill, pattern

from moonpool.transfer_engine import (
    ArgumentTypeError,
    BatchError,
    InvalidArgumentError,
    OutOfRangeError,
    RegionReadOnlyError,
    Status,
    TransferState,
)

# -------------------------------------------------------------------- forms of a batch


def strided(values: list[int]) -> np.ndarray:
    wide = np.zeros((len(values), 3), dtype=np.int64)
    wide[:, 1] = values
    return wide[:, 1]


def unaligned(values: list[int]) -> np.ndarray:
    raw = np.frombuffer(b"\0" + np.array(values, dtype=np.int64).tobytes(), dtype=np.uint8)
    return raw[1:].view(np.int64)


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "int64": lambda values: np.array(values, dtype=np.int64),
    "uint64": lambda values: np.array(values, dtype=np.uint64),
    "int32": lambda values: np.array(values, dtype=np.int32),
    "uint32": lambda values: np.array(values, dtype=np.uint32),
    "int16": lambda values: np.array(values, dtype=np.int16),
    "uint16": lambda values: np.array(values, dtype=np.uint16),
    "explicit little-endian": lambda values: np.array(values, dtype="<i4"),
    "strided": strided,
    "negative stride": lambda values: np.array(values[::-1], dtype=np.int64)[::-1],
    "unaligned": unaligned,
    "array.array": lambda values: array.array("q", values),
    "memoryview": lambda values: memoryview(array.array("l", values)),
    "list": list,
    "tuple": tuple,
    "list of numpy ints": lambda values: [np.int64(value) for value in values],
}
OFFSETS = [0, 12_288, 4096, 8192]


@pytest.mark.parametrize("form", FORMS)
def test_offsets_in_any_form(pair: Pair, form: str) -> None:
    fill(pair.region)
    local_offsets, remote_offsets, lengths = OFFSETS, OFFSETS[::-1], [4096, 1000, 1, 4095]
    make = FORMS[form]
    pair.client.read(
        pair.peer, pair.local, pair.remote, make(local_offsets), make(remote_offsets), make(lengths)
    ).wait()
    expected = bytearray(1 << 16)
    for local, remote, length in zip(local_offsets, remote_offsets, lengths, strict=True):
        expected[local : local + length] = pattern(1 << 16)[remote : remote + length]
    assert bytes(pair.local) == bytes(expected)


def test_items_of_several_local_regions(pair: Pair) -> None:
    fill(pair.region)
    other = pair.client.allocate(1 << 16)
    both = [pair.local, other]
    pair.client.read(pair.peer, (both, np.array([0, 1, 1])), pair.remote, [0, 0, 500], [10, 20, 30], 100).wait()
    assert bytes(pair.local)[:100] == pattern(1 << 16)[10:110]
    assert bytes(other)[:100] == pattern(1 << 16)[20:120]
    assert bytes(other)[500:600] == pattern(1 << 16)[30:130]
    plan = pair.client.prepare(pair.peer, (both, [1, 0]), pair.remote, 0, [1000, 2000], 50)
    pair.client.post(plan, op="write").wait()
    assert bytes(pair.region)[1000:1050] == bytes(other)[:50]
    assert bytes(pair.region)[2000:2050] == bytes(pair.local)[:50]
    other.release()
    transfer = pair.client.read(pair.peer, (both, [0, 1]), pair.remote, 0, [300, 400], 10)
    with pytest.raises(BatchError):
        transfer.wait()
    assert list(transfer.statuses) == [Status.OK, Status.REGION_RELEASED]
    for wrong, error in (
        ((both, [0, 2]), InvalidArgumentError),
        ((both, [0, -1]), InvalidArgumentError),
        ((both, [0, 1, 0]), InvalidArgumentError),
        ((both,), ArgumentTypeError),
        (([], []), ArgumentTypeError),
        ((both, None), ArgumentTypeError),
        (((pair.local, "x"), [0, 1]), ArgumentTypeError),
    ):
        with pytest.raises(error):
            pair.client.read(pair.peer, wrong, pair.remote, 0, [300, 400], 10)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_bytes_as_offsets(pair: Pair, dtype: Any) -> None:
    fill(pair.region)
    offsets = np.array([0, 64, 100], dtype=dtype)
    pair.client.read(pair.peer, pair.local, pair.remote, offsets, offsets, np.int16(10)).wait()
    assert bytes(memoryview(pair.local)[100:110]) == pattern(1 << 16)[100:110]


def test_scalars_and_arrays_mix(pair: Pair) -> None:
    fill(pair.region)
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, np.arange(4) * 100, 0, 100).wait()
    assert len(transfer) == 4
    assert bytes(memoryview(pair.local)[:400]) == pattern(1 << 16)[:100] * 4


@pytest.mark.parametrize("number", [np.int64(64), np.uint8(64), np.array(64), np.array(64, dtype=np.int16)])
def test_numpy_scalars(pair: Pair, number: Any) -> None:
    fill(pair.region)
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, number, number, number).wait()
    assert len(transfer) == 1
    assert bytes(memoryview(pair.local)[64:128]) == pattern(1 << 16)[64:128]
    pair.client.read(pair.peer, pair.local, pair.remote, 0, number).wait()


def test_a_list_of_items_over_several_regions(pair: Pair) -> None:
    other_region = pair.server.allocate(8192, name="other")
    other = pair.peer.regions.wait("other", 90.0)
    fill(pair.region)
    fill(other_region, seed=1)
    second = pair.client.allocate(8192)
    items = [
        (pair.local, 0, pair.remote, 100, 50),
        (second, 10, other, 0, 60),
        (pair.local, np.int64(200), other, 8000, 192),
        [second, 4000, pair.remote, 0, 1],
    ]
    pair.client.read(pair.peer, items).wait()
    assert bytes(memoryview(pair.local)[:50]) == pattern(1 << 16)[100:150]
    assert bytes(memoryview(second)[10:70]) == pattern(8192, seed=1)[:60]
    assert bytes(memoryview(pair.local)[200:392]) == pattern(8192, seed=1)[8000:]
    assert bytes(memoryview(second)[4000:4001]) == pattern(1)
    pair.client.write(pair.peer, iter(items[:1])).wait()
    pair.client.write(pair.peer, tuple(items[:1])).wait()


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        (1.5, ArgumentTypeError),
        ("0", ArgumentTypeError),
        (None, ArgumentTypeError),
        (True, ArgumentTypeError),
        (object(), ArgumentTypeError),
        ({1, 2}, ArgumentTypeError),
        (np.array([0.0, 1.0]), ArgumentTypeError),
        (np.array([True, False]), ArgumentTypeError),
        (np.array(["a"]), ArgumentTypeError),
        (np.array([1, 2], dtype=object), ArgumentTypeError),
        (np.array([1, 2], dtype=">i8"), ArgumentTypeError),
        (np.array([1], dtype="datetime64[s]"), ArgumentTypeError),
        (np.zeros((2, 2), dtype=np.int64), InvalidArgumentError),
        ([1, "2"], ArgumentTypeError),
        ([1, True], ArgumentTypeError),
        ([[1]], ArgumentTypeError),
        (1 << 63, OutOfRangeError),
        (-(1 << 70), OutOfRangeError),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_offsets_of_a_wrong_kind(open_pair: Any, offsets: Any, error: type[Exception], place: int) -> None:
    pair: Pair = open_pair("local")
    arguments = [0, 0, 4]
    if place == 2 and offsets is None:
        return  # that is "the rest"
    arguments[place] = offsets
    with pytest.raises(error) as caught:
        pair.client.read(pair.peer, pair.local, pair.remote, *arguments)
    assert ("local_offsets", "remote_offsets", "lengths")[place] in str(caught.value)
    assert caught.value.hint  # type: ignore[attr-defined]


def test_arrays_of_different_lengths(open_pair: Any) -> None:
    pair: Pair = open_pair("local")
    with pytest.raises(InvalidArgumentError, match=r"local_offsets has 3 entries, lengths has 2"):
        pair.client.read(pair.peer, pair.local, pair.remote, np.arange(3), 0, np.ones(2, dtype=np.int64))


def test_an_empty_batch(pair: Pair) -> None:
    with pytest.raises(InvalidArgumentError):
        pair.client.read(pair.peer, pair.local, pair.remote, np.zeros(0, dtype=np.int64), 0, 64)
    with pytest.raises(InvalidArgumentError):
        pair.client.read(pair.peer, [])


@pytest.mark.parametrize(
    ("local", "remote", "what"),
    [
        (lambda pair: bytearray(64), lambda pair: pair.remote, "local"),
        (lambda pair: pair.local, lambda pair: pair.region, "remote"),
        (lambda pair: pair.local, lambda pair: "kv", "remote"),
        (lambda pair: pair.remote, lambda pair: pair.local, "local"),
    ],
)
def test_what_is_no_region(open_pair: Any, local: Any, remote: Any, what: str) -> None:
    pair: Pair = open_pair("local")
    with pytest.raises(ArgumentTypeError, match=f"^{what} is a"):
        pair.client.read(pair.peer, local(pair), remote(pair), 0, 0, 64)


def test_forms_that_do_not_fit_together(open_pair: Any) -> None:
    pair: Pair = open_pair("local")
    item = (pair.local, 0, pair.remote, 0, 64)
    with pytest.raises(ArgumentTypeError, match="remote is missing"):
        pair.client.read(pair.peer, pair.local)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match="beside a list"):
        pair.client.read(pair.peer, [item], lengths=4)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match="beside a list"):
        pair.client.read(pair.peer, [item], None, 4)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match="lengths is None"):
        pair.client.read(pair.peer, pair.local, pair.remote, 0, np.arange(4))
    with pytest.raises(ArgumentTypeError, match="local is a int"):
        pair.client.read(pair.peer, 7)  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="no region"):
        pair.client.write(pair.peer, "kv", pair.remote)  # type: ignore[call-overload]
    for peer in (None, "127.0.0.1:7700", pair.client):
        with pytest.raises(ArgumentTypeError, match="peer"):
            pair.client.read(peer, pair.local, pair.remote)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (lambda pair: (pair.local, 0, pair.remote, 0), "item 1"),
        (lambda pair: "local", "item 1"),
        (lambda pair: (pair.local, 0.5, pair.remote, 0, 4), "item 1: local_offset"),
        (lambda pair: (pair.local, 0, pair.remote, True, 4), "item 1: remote_offset"),
        (lambda pair: (pair.local, 0, pair.remote, 0, None), "item 1: length"),
        (lambda pair: (bytearray(4), 0, pair.remote, 0, 4), "item 1: local"),
        (lambda pair: (pair.local, 0, pair.local, 0, 4), "item 1: remote"),
    ],
)
def test_an_item_of_a_wrong_kind_is_named(open_pair: Any, item: Any, text: str) -> None:
    pair: Pair = open_pair("local")
    with pytest.raises(ArgumentTypeError, match=text):
        pair.client.read(pair.peer, [(pair.local, 0, pair.remote, 0, 4), item(pair)])


# -------------------------------------------------------------------- status per item


BAD_ITEMS = [
    (0, 0, 0),
    (0, 0, -1),
    (-1, 0, 4),
    (0, -1, 4),
    (1 << 16, 0, 1),
    (0, 1 << 16, 1),
    ((1 << 16) - 3, 0, 4),
    (0, (1 << 16) - 3, 4),
    (0, 0, (1 << 16) + 1),
    ((1 << 63) - 1, 0, (1 << 63) - 1),
    (0, (1 << 63) - 1, 1),
    (1, 1, (1 << 63) - 1),
    (0, 0, 1 << 100),
    (0, -(1 << 100), 1),
]


@pytest.mark.parametrize("bad", BAD_ITEMS)
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_bad_item_gets_its_own_status(pair: Pair, bad: tuple[int, int, int], op: str) -> None:
    fill(pair.region if op == "read" else pair.local)
    local_offset, remote_offset, length = bad
    items = [
        (pair.local, 0, pair.remote, 0, 64),
        (pair.local, local_offset, pair.remote, remote_offset, length),
        (pair.local, 128, pair.remote, 128, 64),
    ]
    transfer = getattr(pair.client, op)(pair.peer, items)
    with pytest.raises(BatchError) as caught:
        transfer.wait()
    assert transfer.state is TransferState.FAILED
    assert transfer.statuses == bytes([Status.OK, Status.OUT_OF_RANGE, Status.OK])
    assert caught.value.failed == [1]
    assert caught.value.item == 1
    assert isinstance(caught.value.__cause__, OutOfRangeError)
    assert "1 of 3 items" in str(caught.value)
    goal = pair.local if op == "read" else pair.region
    assert bytes(memoryview(goal)[:64]) == pattern(64)
    assert bytes(memoryview(goal)[128:192]) == pattern(1 << 16)[128:192]


@pytest.mark.parametrize("bad", BAD_ITEMS[:-2])
def test_a_transfer_without_a_good_item_is_refused_at_once(pair: Pair, bad: tuple[int, int, int]) -> None:
    with pytest.raises(OutOfRangeError) as caught:
        pair.client.write(pair.peer, pair.local, pair.remote, *bad)
    assert caught.value.item == 0
    assert caught.value.hint
    numbers = [np.array([number, number]) for number in bad]
    with pytest.raises(OutOfRangeError):
        pair.client.write(pair.peer, pair.local, pair.remote, *numbers)


def test_many_bad_items_among_good_ones(pair: Pair) -> None:
    fill(pair.region)
    offsets = np.arange(1000) * 64
    offsets[::7] = 1 << 20
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, np.arange(1000) * 64, offsets, 64)
    with pytest.raises(BatchError, match="143 of 1000 items"):
        transfer.result()
    statuses = np.frombuffer(transfer.statuses, dtype=np.uint8)
    assert (statuses[::7] == Status.OUT_OF_RANGE).all()
    assert (statuses == Status.OK).sum() == 857
    good = np.frombuffer(pair.local, dtype=np.uint8)[:64_000].reshape(1000, 64)
    expected = np.frombuffer(pattern(64_000), dtype=np.uint8).reshape(1000, 64)
    assert (good[statuses == Status.OK] == expected[statuses == Status.OK]).all()
    assert not good[::7].any()


def test_a_write_into_a_read_only_region(pair: Pair) -> None:
    pair.server.register(pattern(4096), name="constant", writable=False)
    remote = pair.peer.regions.wait("constant", 90.0)
    with pytest.raises(RegionReadOnlyError) as caught:
        pair.client.write(pair.peer, pair.local, remote, 0, 0, 64).wait()
    assert "constant" in str(caught.value)


def test_a_read_into_a_read_only_region(pair: Pair) -> None:
    local = pair.client.register(pattern(4096), writable=False)
    with pytest.raises(RegionReadOnlyError):
        pair.client.read(pair.peer, local, pair.remote, 0, 0, 64).wait()
    pair.client.write(pair.peer, local, pair.remote, 0, 0, 4096).wait()
    assert bytes(memoryview(pair.region)[:4096]) == pattern(4096)


def test_released_regions_spoil_their_items_only(pair: Pair) -> None:
    """On either side: the handles of released regions are refused item by item."""
    gone_local = pair.client.allocate(4096)
    gone_region = pair.server.allocate(4096, name="gone")
    gone_remote = pair.peer.regions.wait("gone", 90.0)
    gone_local.release()
    gone_region.release()
    fill(pair.region)
    transfer = pair.client.read(
        pair.peer,
        [
            (gone_local, 0, pair.remote, 0, 64),
            (pair.local, 0, pair.remote, 0, 64),
            (pair.local, 64, gone_remote, 0, 64),
        ],
    )
    with pytest.raises(BatchError):
        transfer.wait()
    assert transfer.statuses == bytes([Status.REGION_RELEASED, Status.OK, Status.REGION_RELEASED])
    assert bytes(memoryview(pair.local)[:64]) == pattern(64)
