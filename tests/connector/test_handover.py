# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""Prefill and decode: what one scheduler hands over, and what another one makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing.configs import LLAMA
from connector_testing.rig import Pool, Rig, rig

pytestmark = THEIR_WARNINGS

BLOCK = 16
CHUNK = 64
PROMPT = [index * 7 % 500 + 3 for index in range(300)]
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
EXTRA = {"chunk_tokens": CHUNK}


def sampling(params: Any) -> dict[str, Any]:
    return {"sampling": {"extra_args": {"kv_transfer_params": params}}}


def prefill(made: Rig, tokens: list[int], *, ends: bool = True, saved: bool = True) -> Any:
    """Compute a prompt and return what is handed over; its saves end, or go on."""
    name = made.add(tokens, outputs=1, **sampling(WANTED))
    made.wait_for_lookups()
    while name in made.scheduler.requests:
        made.step()
    made.step()
    if ends:
        for job_id in list(made.saves):
            made.end_save(job_id, saved=saved)
        made.step()
    return made.params.get(name)


def decode(made: Rig, tokens: list[int], params: Any, *, seconds: float = 10.0) -> int:
    """Add a request that was handed over, and return how many tokens come once the answer is known."""
    name = made.add(tokens, outputs=4, **sampling(params))
    end = time.monotonic() + seconds
    while True:
        found, in_background = made.connector.get_num_new_matched_tokens(made.scheduler.requests[name], 0)
        if found is not None:
            assert in_background == (found > 0)
            return int(found)
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("mode", ["sync", "layerwise", "async", "prefetch"])
@pytest.mark.parametrize("length", [5, 16, 17, 48, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192, 250])
def test_the_whole_prompt_comes_over_but_for_its_last_block(mode: str, length: int) -> None:
    pool = Pool()
    tokens = PROMPT[:length]
    with rig(EXTRA, pool=pool, role="kv_producer") as first:
        params = prefill(first, tokens)
        first.check_end()
    if length < BLOCK:
        assert params is None
        return
    assert params["remote_num_tokens"] == length // BLOCK * BLOCK
    with rig({**EXTRA, "load_mode": mode}, pool=pool, role="kv_consumer") as second:
        assert decode(second, tokens, params) == (length - 1) // BLOCK * BLOCK
        second.check_end()
        assert second.counts["handovers_taken"] == (length > BLOCK)
        assert second.counts["handovers_late"] == 0


def test_without_a_hand_over_no_tail_is_saved_or_found() -> None:
    pool = Pool()
    with rig(EXTRA, pool=pool) as first:
        first.add(PROMPT[:100], outputs=1)
        first.check_end()
        assert len(pool.chunks) == 1
        assert not first.params
        prefill(first, PROMPT[:100])
        assert len(pool.chunks) == 2
        assert first.reset()
        name = first.add(PROMPT[:100], outputs=1)
        first.wait_for_lookups()
        assert first.connector.get_num_new_matched_tokens(first.scheduler.requests[name], 0) == (CHUNK, True)
        first.check_end()


def test_what_is_being_saved_is_waited_for() -> None:
    pool = Pool()
    with rig(EXTRA, pool=pool, role="kv_producer") as first:
        params = prefill(first, PROMPT[:100], ends=False)
        with rig({**EXTRA, "handover_wait": 30.0}, pool=pool, role="kv_consumer") as second:
            name = second.add(PROMPT[:100], outputs=4, **sampling(params))
            for _ in range(30):
                second.step()
                second.wait_for_lookups()
                assert not second.loads
            asked = pool.asked
            first.check_end()
            end = time.monotonic() + 10
            while not second.loads:
                second.step()
                assert time.monotonic() < end
            assert (len(second.loads[name].hashes), second.loads[name].tail_blocks) == (64, 2)
            second.check_end()
            # Asked again, and not at every step.
            assert 1 < asked < 30


def test_what_never_comes_is_computed_after_a_while() -> None:
    pool = Pool()
    with rig(EXTRA, pool=pool, role="kv_producer") as first:
        params = prefill(first, PROMPT[:200], saved=False)
        first.check_end()
    with rig({**EXTRA, "handover_wait": 0.05}, pool=pool, role="kv_consumer") as second:
        assert decode(second, PROMPT[:200], params) == 0
        second.check_end()
        assert second.counts["handovers_late"] == 1


def test_a_tail_that_cannot_be_loaded_is_computed_and_not_asked_for_again() -> None:
    pool = Pool()
    with rig(EXTRA, pool=pool, role="kv_producer") as first:
        params = prefill(first, PROMPT[:100])
        first.check_end()
    with rig(EXTRA, pool=pool, role="kv_consumer") as second:
        name = second.add(PROMPT[:100], outputs=40, **sampling(params))
        second.wait_for_lookups()
        second.step()
        second.end_load(name, good=1)
        second.check_end()
        assert second.counts["hits"] == 1


def test_what_is_decoded_behind_a_tail_is_saved_as_a_whole_chunk() -> None:
    pool = Pool()
    with rig(EXTRA, pool=pool) as made:
        params = prefill(made, PROMPT[:100])
        assert made.reset()
        made.add(PROMPT[:100], outputs=100, **sampling(params))
        made.check_end()
        # A chunk and a tail of the first, then two chunks more.
        assert len(pool.chunks) == 4


def test_a_request_that_is_aborted_hands_nothing_over() -> None:
    with rig(EXTRA) as made:
        name = made.add(PROMPT, outputs=20, **sampling(WANTED))
        made.wait_for_lookups()
        for _ in range(4):
            made.step()
        made.abort(name)
        made.check_end()
        assert made.counts["handovers_offered"] == 0


def test_without_room_only_what_is_saved_is_offered() -> None:
    with rig({**EXTRA, "saving_blocks_max": 8 / 64}) as made:
        params = prefill(made, PROMPT[:250], ends=False)
        # Two chunks fill it.
        assert params["remote_num_tokens"] == 2 * CHUNK
        made.check_end()


@pytest.mark.parametrize("away", [True, False])
def test_without_a_pool_nothing_is_offered(away: bool) -> None:
    with rig({**EXTRA, "save_mode": "all" if away else "off", "retry": 60.0}) as made:
        if away:
            made.pool.failing = True
            made.add(PROMPT, outputs=1)
            made.wait_for_lookups()
        assert prefill(made, PROMPT[:100]) is None
        made.check_end()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model": {"num_hidden_layers": 5}}, "another model, revision or tenant"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16 there and float32 here"),
        ({"block_tokens": 32}, "block_tokens is 32 there and 16 here"),
        ({"parallel": {"tensor_parallel_size": 2}}, "tp is 2 there and 1 here"),
    ],
)
def test_an_engine_with_other_kv_is_refused_with_the_reason_and_the_request_computed(
    other: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    if "model" in other:
        other = {"model": {**LLAMA, **other["model"]}}
    with rig(EXTRA, role="kv_producer", **other) as first:
        first.workers = first.config.parallel_config.world_size
        params = prefill(first, PROMPT[:100])
        first.check_end()
    # The pool keeps what is of another namespace apart, and this one knows of none.
    with rig(EXTRA, role="kv_consumer") as second:
        assert decode(second, PROMPT[:100], params) == 0
        assert decode(second, PROMPT[:100], params) == 0
        second.check_end()
        assert second.counts["handovers_refused"] == 2
    assert caplog.text.count(words) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"moonpool_identity": None},
        {"moonpool_identity": 7},
        {"remote_num_tokens": "100"},
        {"remote_num_tokens": -1},
        {"remote_num_tokens": True},
        {"remote_num_tokens": 10**9},
        {"moonpool_facts": ["tp"]},
        {"moonpool_facts": None, "moonpool_identity": "x"},
    ],
)
def test_params_that_somebody_made_up_hurt_nobody(change: dict[str, Any]) -> None:
    pool = Pool()
    with rig({**EXTRA, "handover_wait": 0.01}, pool=pool) as made:
        params = prefill(made, PROMPT[:100])
        assert made.reset()
        assert decode(made, PROMPT[:100], {**params, **change}) in (0, CHUNK, 96)
        made.check_end()


def test_after_a_reset_nothing_is_handed_over() -> None:
    pool = Pool()
    with rig(EXTRA, pool=pool) as made:
        params = prefill(made, PROMPT[:100])
        assert made.reset(reset_connector=True)
        assert prefill(made, PROMPT[:100]) is None
        assert made.reset()
        # Only by itself: a chunk that it has saved anew.
        assert decode(made, PROMPT[:100], params) == CHUNK
        made.check_end()
