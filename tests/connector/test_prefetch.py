# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""Prefetches in vLLM's own scheduler: a request has no blocks before its chunks are in the memory of all workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing.rig import Rig, rig

pytestmark = THEIR_WARNINGS

CHUNK = 32
PROMPT = [index * 7 % 500 + 3 for index in range(100)]


def steps(made: Rig, count: int = 2) -> None:
    for _ in range(count):
        made.wait_for_lookups()
        made.step()


def end_saves(made: Rig) -> None:
    for job_id in list(made.saves):
        made.end_save(job_id)


@pytest.fixture
def made() -> Iterator[Rig]:
    """With the chunks of the prompt in the pool, and none of them in vLLM's own cache."""
    with rig({"load_mode": "prefetch"}) as its:
        fill(its)
        yield its


def fill(made: Rig) -> None:
    made.add(PROMPT, outputs=1)
    for _ in range(50):
        steps(made, 1)
        end_saves(made)
        if not made.scheduler.has_requests():
            break
    assert len(made.pool.chunks) == 3
    assert made.reset()


def begun(made: Rig, prompt: list[int] = PROMPT) -> tuple[str, int]:
    """Add a request, and return it with its fetch."""
    name = made.add(prompt, outputs=4)
    steps(made)
    (fetch_id,) = made.fetches
    return name, fetch_id


def test_no_block_is_held_before_everything_is_there(made: Rig) -> None:
    name, fetch_id = begun(made)
    assert len(made.fetches[fetch_id].hashes) == 3 * 32
    other = made.add([501, *PROMPT], outputs=2)  # others run meanwhile
    for _ in range(5):
        steps(made, 1)
        assert not made.block_ids(name)
        end_saves(made)
    assert other not in made.scheduler.requests
    steps(made)
    assert made.blocks.get_num_free_blocks() == made.free_at_first
    made.end_fetch(fetch_id)
    steps(made)
    assert made.block_ids(name)
    assert made.counts["hit_tokens"] == 96
    made.check_end()
    assert made.counts["hits"] == 1


def test_every_worker_has_to_have_it() -> None:
    with rig({"load_mode": "prefetch"}) as made:
        fill(made)
        made.connector._scheduler._loads.fetches._workers = 2
        name, fetch_id = begun(made)
        job = made.fetches[fetch_id]
        made.end_fetch(fetch_id)
        steps(made)
        assert not made.block_ids(name)
        made.fetches[fetch_id] = job
        made.end_fetch(fetch_id, good=2)
        steps(made)
        assert made.counts["hit_tokens"] == 64
        made.check_end()


@pytest.mark.parametrize("good", [0, 1, 2])
def test_what_has_not_come_is_computed_and_not_fetched_again(made: Rig, good: int) -> None:
    _, fetch_id = begun(made)
    made.end_fetch(fetch_id, good=good)
    steps(made)
    assert made.counts["hit_tokens"] == good * CHUNK
    assert not made.fetches
    made.check_end()


def test_a_prefetch_that_is_too_slow_is_given_up() -> None:
    with rig({"load_mode": "prefetch"}) as made:
        fill(made)
        name, fetch_id = begun(made)
        made.connector._scheduler._tracked[name].fetch.until = 0.0
        steps(made, 1)
        assert made.block_ids(name)
        assert fetch_id not in made.fetches  # the workers know
        made.check_end()
        assert made.counts["misses_slow"] == 1


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_that_is_aborted_wants_nothing_any_more(made: Rig, ended: bool) -> None:
    name, fetch_id = begun(made)
    if ended:
        made.end_fetch(fetch_id)
    made.abort(name)
    assert made.connector.has_pending_push_work()
    made.step()
    assert not made.fetches
    assert not made.fetched
    assert not made.connector.has_pending_push_work()
    made.check_end()


def test_an_end_that_is_told_late_is_of_no_use(made: Rig) -> None:
    name, fetch_id = begun(made)
    made.abort(name)
    made._said.fetched[fetch_id] = 1, 3
    steps(made)
    made.check_end()


def test_what_was_fetched_before_a_reset_is_not_loaded(made: Rig) -> None:
    _, fetch_id = begun(made)
    made.end_fetch(fetch_id)
    assert made.reset(reset_connector=True)
    steps(made)
    assert made.counts["hit_tokens"] == 0
    made.check_end()


def test_what_vllm_has_by_then_is_not_loaded(made: Rig) -> None:
    _, first = begun(made)
    made.add(PROMPT[:80], outputs=1)  # less of the same
    steps(made)
    (second,) = made.fetches.keys() - {first}
    made.end_fetch(second)
    steps(made)
    made.end_fetch(first)
    steps(made)
    assert made.counts["hit_tokens"] == 64 + 16
    made.check_end()


def test_a_request_that_gets_no_blocks_yet_loads_later() -> None:
    with rig({"load_mode": "prefetch"}, blocks=14) as made:
        fill(made)
        large = made.add([400, *PROMPT, *PROMPT[:60]], outputs=20)
        steps(made, 2)
        assert made.block_ids(large)
        name, fetch_id = begun(made)
        made.end_fetch(fetch_id)
        steps(made, 3)
        assert not made.block_ids(name)
        for _ in range(60):
            steps(made, 1)
            end_saves(made)
        made.check_end()
        assert made.counts["hits"] >= 1
