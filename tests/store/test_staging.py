# SPDX-License-Identifier: Apache-2.0
"""The staging area: bounded, without overlaps, and whole again at the end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_testing import key, keys

from moonpool.store_client import ClientClosedError, StagingFullError, StoreArgumentError
from moonpool.store_client.arguments import numbers, packed_parents
from moonpool.store_client.moves import Move, Place
from moonpool.store_client.packing import (
    DIGEST_WORD,
    EXTENT,
    HEADER_BYTES,
    hash_matrix,
    headers_of,
)
from moonpool.store_client.segments import Target
from moonpool.store_client.staging import StagingArea
from moonpool.store_client.values import Memory, Registered
from moonpool.transfer_engine import TransferEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(listen=None) as engine:
        yield engine


def soon() -> float:
    return time.monotonic() + 0.05


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=60))
def test_slices_never_overlap_and_come_back(engine: TransferEngine, steps: list[tuple[bool, int]]) -> None:
    area = StagingArea(engine, 8192)
    held = []
    for give_back, nbytes in steps:
        if give_back and held:
            area.give_back(held.pop(nbytes % len(held)))
        else:
            with contextlib.suppress(StagingFullError):
                held.append(area.take(nbytes, 0.0))
        taken = sorted((slice_.offset, slice_.nbytes) for slice_ in held)
        assert all(offset % 64 == 0 and offset + n <= 8192 for offset, n in taken)
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(taken))
        assert area.free_bytes == 8192 - sum(n for _, n in taken)
    for slice_ in held:
        area.give_back(slice_)
    assert area.take(8192, 0.0).nbytes == 8192
    area.region.release()


def test_who_waits_gets_what_is_given_back(engine: TransferEngine) -> None:
    area = StagingArea(engine, 4096)
    first = area.take(4096, soon())
    with pytest.raises(StagingFullError):
        area.take(64, soon())
    got = []
    waiting = threading.Thread(target=lambda: got.append(area.take(64, time.monotonic() + 60)))
    waiting.start()
    area.give_back(first)
    waiting.join(60)
    assert len(got) == 1


def test_closing_wakes_who_waits(engine: TransferEngine) -> None:
    area = StagingArea(engine, 4096)
    held = area.take(4096, soon())
    raised = []

    def wait() -> None:
        try:
            area.take(64, time.monotonic() + 60)
        except ClientClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    area.close()
    waiting.join(60)
    assert len(raised) == 1
    area.give_back(held)


def test_a_slice_that_may_still_be_written_waits(engine: TransferEngine) -> None:
    class Unsettled:
        settled = False

    for given_back in (True, False):
        area, job = StagingArea(engine, 4096), Unsettled()
        slice_ = area.take(4096, soon())
        slice_.jobs.append(job)  # type: ignore[arg-type]
        if given_back:
            area.give_back(slice_)
        else:
            del slice_
        assert area.free_bytes == 0
        with pytest.raises(StagingFullError):
            area.take(64, soon())
        job.settled = True
        assert area.take(64, soon()).offset == 0


def test_a_slice_that_nobody_has_any_more_comes_back(engine: TransferEngine) -> None:
    area = StagingArea(engine, 4096)
    area.take(4096, soon())
    kept = area.take(64, soon())
    assert area.free_bytes == 4096 - 64
    got = []
    waiting = threading.Thread(target=lambda: got.append(area.take(4096, time.monotonic() + 60)))
    waiting.start()
    del kept  # it tells nobody
    waiting.join(60)
    assert len(got) == 1


def test_what_is_given_back_twice_is_free_once(engine: TransferEngine) -> None:
    area = StagingArea(engine, 4096)
    first = area.take(64, soon())
    area.give_back(first)
    second = area.take(64, soon())
    area.give_back(first)
    assert area.take(64, soon()).offset != second.offset


def test_pieces_are_bounded_in_chunks_and_bytes(engine: TransferEngine) -> None:
    region = engine.allocate(1000)
    lengths = np.array([10, 10, 500, 600, 10, 10, 10], dtype=np.int64)
    memory: Memory = Registered(region, np.zeros(7, dtype=np.int64), lengths)
    pieces = [rows.tolist() for rows in memory.pieces(np.arange(7), lengths, 2, 550)]
    assert pieces == [[0, 1], [2], [3], [4, 5], [6]]


def test_headers_are_what_the_contract_says() -> None:
    extents = np.zeros(2, dtype=EXTENT)
    extents["generation"], extents["length"] = (7, 8), (100, 200)
    hashes = keys(2)
    packed = b"".join(hashes)
    headers = headers_of(extents, hash_matrix(packed), 3)
    headers[:, DIGEST_WORD] = 1, 2
    first = headers[0].tobytes()
    assert (
        first
        == b"MPC2"
        + (3).to_bytes(4, "little")
        + (7).to_bytes(8, "little")
        + (100).to_bytes(8, "little")
        + (1).to_bytes(8, "little")
        + hashes[0]
    )
    assert len(first) == HEADER_BYTES == 64


def test_packed_forms_are_checked() -> None:
    assert packed_parents(None, 3) == b""
    assert packed_parents([key(0)], 3) == key(0)
    for wrong in ([key(0)] * 2, [key(0)] * 4):
        with pytest.raises(StoreArgumentError):
            packed_parents(wrong, 3)
    assert numbers(5, 3, "x").tolist() == [5, 5, 5]
    for bad in ([1, 2], 1.5, "7", [[1, 2, 3]]):
        with pytest.raises(StoreArgumentError):
            numbers(bad, 3, "x")


class _Refusing:
    def read(self, *_: object, **__: object) -> None:
        raise ZeroDivisionError


def test_a_transfer_that_was_never_begun_touches_nothing(engine: TransferEngine) -> None:
    region, one = engine.allocate(4096), np.array([64], dtype=np.int64)
    place = Place(region, one, one, region, one - 64, one, one, joined=True)
    move = Move(place, np.arange(1), one, False, "both")
    with pytest.raises(ZeroDivisionError):
        move.start(cast("Any", _Refusing()), Target(1, "", *cast("Any", (None, None)), True), "read", soon() + 60)
    assert move.settled
    region.release()
