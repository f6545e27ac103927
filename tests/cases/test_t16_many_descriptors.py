# SPDX-License-Identifier: Apache-2.0
"""T16.

What people met: 1,000 small descriptors cost 17 ms, 15,000 cost 0.6 s.

What must happen instead: arrays in, no per-item Python; at most 1 µs of CPU per descriptor.

The microseconds are measured by `mooncake-bench`. Here it is shown that the work per item is not done in Python:
neither calls nor objects grow with the number of items.
"""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import Pair
from engine_testing.patterns import fill, pattern

ITEMS = 100_000
BLOCK = 64
NBYTES = ITEMS * BLOCK


@pytest.fixture
def columns() -> tuple[np.ndarray, np.ndarray]:
    blocks = np.arange(ITEMS, dtype=np.int64) * BLOCK
    shuffled = blocks.copy()
    np.random.default_rng(0).shuffle(shuffled)
    return blocks, shuffled


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_hundred_thousand_in_one_transfer(open_pair: Any, transport: str, op: str, columns: Any) -> None:
    pair: Pair = open_pair(transport, nbytes=NBYTES)
    source, target = (pair.region, pair.local) if op == "read" else (pair.local, pair.region)
    fill(source)
    blocks, shuffled = columns
    getattr(pair.client, op)(pair.peer, pair.local, pair.remote, blocks, shuffled, BLOCK).wait()
    was = np.frombuffer(pattern(NBYTES), dtype=np.uint8).reshape(ITEMS, BLOCK)
    now = np.frombuffer(target, dtype=np.uint8).reshape(ITEMS, BLOCK)
    if op == "read":
        np.testing.assert_array_equal(now, was[shuffled // BLOCK])
    else:
        np.testing.assert_array_equal(now[shuffled // BLOCK], was)


def python_events(call: Any) -> int:
    """Count the calls of Python and C functions that `call` makes in this thread."""
    events = 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return events


def test_the_number_of_items_costs_no_python_calls(open_pair: Any, transport: str, columns: Any) -> None:
    pair: Pair = open_pair(transport, nbytes=NBYTES)
    blocks, shuffled = columns

    def move(items: int) -> Any:
        return lambda: pair.client.read(
            pair.peer, pair.local, pair.remote, blocks[:items], shuffled[:items], BLOCK, digest=True
        ).result()

    assert python_events(move(ITEMS)) == python_events(move(1)) <= 30


def test_the_number_of_items_costs_no_python_objects(open_pair: Any, transport: str, columns: Any) -> None:
    pair: Pair = open_pair(transport, nbytes=NBYTES)
    blocks, shuffled = columns
    tracemalloc.start()
    try:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote, blocks, shuffled, BLOCK).wait()
        _, peak = tracemalloc.get_traced_memory()
        statuses = transfer.statuses
        _, with_statuses = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_384
    # One byte per item, for the caller who asks for them.
    assert len(statuses) == ITEMS
    assert with_statuses < ITEMS + 16_384


def test_a_plan_posts_a_subset_without_python_work(open_pair: Any, transport: str, columns: Any) -> None:
    pair: Pair = open_pair(transport, nbytes=NBYTES)
    fill(pair.region)
    blocks, shuffled = columns
    plan = pair.client.prepare(pair.peer, pair.local, pair.remote, blocks, shuffled, BLOCK)
    half = np.arange(0, ITEMS, 2)
    assert python_events(lambda: pair.client.post(plan, half).wait()) <= 30
    got = np.frombuffer(pair.local, dtype=np.uint8).reshape(ITEMS, BLOCK)
    expected = np.frombuffer(pattern(NBYTES), dtype=np.uint8).reshape(ITEMS, BLOCK)[shuffled // BLOCK]
    np.testing.assert_array_equal(got[::2], expected[::2])
    assert not got[1::2].any()
