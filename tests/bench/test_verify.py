# SPDX-License-Identifier: Apache-2.0
"""No wrong byte goes unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.verify import Pattern, Verdict
from moonpool.bench.work import Layout, Work


class Pair:
    """Source and destination of a work, with a perfect transfer between them."""

    def __init__(self, block_bytes: int = 64, batch: int = 2, order: str = "random", threads: int = 2) -> None:
        self.work = Work("tcp", "write", block_bytes, batch, order, threads, None, block_bytes * batch * threads * 5)
        self.layouts = Layout(self.work, target=False), Layout(self.work, target=True)
        self.source = np.zeros(self.work.footprint_bytes, np.uint8)
        self.destination = np.zeros(self.work.footprint_bytes, np.uint8)
        self.sent = Pattern(self.source, self.layouts[0])
        self.received = Pattern(self.destination, self.layouts[1])
        self.sent.fill(1)
        self.received.fill(0)

    def move(self, thread: int, index: int) -> None:
        for block in range(self.work.blocks)[self.layouts[0].batch(thread, index)]:
            source, destination = (int(layout.offsets[block]) for layout in self.layouts)
            length = self.work.block_bytes
            self.destination[destination : destination + length] = self.source[source : source + length]

    def check(self, *done: tuple[int, int]) -> Verdict:
        self.received.expect(1, done)
        return self.received.check()


@pytest.mark.parametrize("order", ["sequential", "random"])
@pytest.mark.parametrize("block_bytes", [8, 64, 4096, 3 * 256 * 1024 + 8])
def test_a_perfect_transfer_is_verified(order: str, block_bytes: int) -> None:
    pair = Pair(block_bytes=block_bytes, order=order)
    for thread, (first, end) in enumerate([(0, 3), (2, 4)]):
        for index in range(first, end):
            pair.move(thread, index)
    assert pair.check((0, 3), (2, 4)) == Verdict(True)
    assert pair.sent.check() == Verdict(True)


def test_batches_wrap_around() -> None:
    pair = Pair()
    for index in range(3, 9):
        pair.move(0, index)
    assert pair.check((3, 9), (0, 0)).ok


@given(st.data())
def test_every_flipped_bit_is_found_where_it_is(data: st.DataObject) -> None:
    pair = Pair(block_bytes=data.draw(st.sampled_from([8, 24, 64])))
    at = data.draw(st.integers(0, pair.work.blocks * pair.work.block_bytes - 1))
    pair.destination[at] ^= 1 << data.draw(st.integers(0, 7))
    verdict = pair.check((0, 0), (0, 0))
    assert (verdict.ok, verdict.blocks_bad) == (False, 1)
    assert f"byte {at} of the memory" in verdict.detail


def test_a_batch_that_never_came_is_found() -> None:
    pair = Pair()
    pair.move(0, 0)
    verdict = pair.check((0, 2), (0, 0))
    assert (verdict.ok, verdict.blocks_bad) == (False, pair.work.batch)


def test_bytes_of_an_earlier_window_are_found() -> None:
    pair = Pair()
    pair.move(0, 0)
    assert pair.check((0, 1), (0, 0)).ok
    pair.sent.fill(2)
    pair.received.expect(2, [(0, 1), (0, 0)])
    assert not pair.received.check().ok


def test_a_batch_that_nobody_counted_is_found() -> None:
    pair = Pair()
    pair.move(1, 4)
    assert pair.check((0, 0), (0, 0)).blocks_bad == pair.work.batch


def test_exchanged_blocks_are_found() -> None:
    pair = Pair()
    first, second = pair.destination[:64].copy(), pair.destination[64:128].copy()
    pair.destination[:64], pair.destination[64:128] = second, first
    assert pair.check((0, 0), (0, 0)).blocks_bad == 2


def test_a_damaged_source_is_found() -> None:
    pair = Pair()
    pair.source[17] ^= 1
    assert not pair.sent.check().ok


def test_a_verdict_travels_as_json() -> None:
    verdict = Verdict(False, 3, "where")
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert not Verdict.from_json({"ok": "yes"}).ok
