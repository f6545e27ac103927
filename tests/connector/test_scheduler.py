# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""The scheduler side in vLLM's own scheduler: what is loaded and saved, step by step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing.rig import SALT, Pool, Rig, rig

pytestmark = THEIR_WARNINGS

CHUNK = 32
PROMPT = [index * 7 % 500 + 3 for index in range(100)]
MODES = pytest.mark.parametrize("mode", ["sync", "layerwise", "async"])


def run(made: Rig, *, saved: bool = True) -> None:
    """Step until all requests have ended, and everything is saved."""
    for _ in range(200):
        made.wait_for_lookups()
        made.step()
        for name in list(made.loads):
            made.end_load(name)
        for job_id in list(made.saves):
            made.end_save(job_id, saved=saved)
        for fetch_id in list(made.fetches):
            made.end_fetch(fetch_id)
        if not made.scheduler.has_requests():
            return
    raise AssertionError("requests that never end")


def fresh(made: Rig) -> None:
    """Empty vLLM's own cache."""
    assert made.reset()


def matched(made: Rig, name: str, local: int = 0) -> tuple[int | None, bool]:
    made.wait_for_lookups()
    answer: tuple[int | None, bool] = made.connector.get_num_new_matched_tokens(made.scheduler.requests[name], local)
    return answer


def counts(made: Rig) -> Counter[str]:
    made.step()
    return made.counts


@MODES
def test_what_is_computed_is_saved_and_found_again(mode: str) -> None:
    with rig({"load_mode": mode}) as made:
        made.add(PROMPT, outputs=40)
        run(made)
        # The token that was sampled last is never computed.
        assert len(made.pool.chunks) == (100 + 39) // CHUNK
        fresh(made)
        name = made.add(PROMPT, outputs=40)
        assert matched(made, name) == (96, mode == "async")
        run(made)
        made.check_end()


@MODES
def test_a_prompt_that_is_all_there_computes_its_last_block(mode: str) -> None:
    with rig({"load_mode": mode}) as made:
        made.add(PROMPT[:96], outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT[:96], outputs=1)
        assert matched(made, name) == (80, mode == "async")
        run(made)
        made.check_end()


@MODES
def test_local_blocks_are_not_loaded(mode: str) -> None:
    with rig({"load_mode": mode}) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        # One block and a half of a chunk: vLLM's own cache has the first block.
        with_one_block = made.add(PROMPT[:17], outputs=1)
        run(made)
        assert with_one_block not in made.scheduler.requests
        name = made.add(PROMPT, outputs=1)
        assert matched(made, name, 16) == (80, mode == "async")
        run(made)
        made.check_end()


def test_the_same_question_has_the_same_answer() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT, outputs=1)
        first = matched(made, name)
        asked = made.pool.asked
        assert [matched(made, name) for _ in range(100)] == [first] * 100
        assert made.pool.asked == asked
        made.check_end()


def test_a_request_waits_for_an_answer_and_others_run() -> None:
    with rig() as made:
        made.pool.go_on.clear()
        made.add(PROMPT, outputs=1)
        made.step()
        assert not made.scheduler.running
        made.pool.go_on.set()
        made.wait_for_lookups()
        made.step()
        made.check_end()


def test_an_answer_that_is_late_is_a_miss() -> None:
    with rig({"lookup_timeout": 0.0}) as made:
        made.pool.go_on.clear()
        name = made.add(PROMPT, outputs=1)
        made.step()
        assert name not in made.scheduler.requests or made.scheduler.running
        assert counts(made)["misses_late"] == 1
        made.check_end()


def test_a_pool_that_fails_is_away_for_a_while() -> None:
    with rig({"retry": 60.0}) as made:
        made.pool.failing = True
        made.add(PROMPT, outputs=1)
        run(made)
        assert counts(made)["misses_failed"] == 1
        asked = made.pool.asked
        made.add(PROMPT, outputs=1)
        run(made)
        assert made.pool.asked == asked
        assert not made.pool.chunks
        assert counts(made)["chunks_dropped_away"] == 3 + 3
        made.check_end()


def test_too_many_lookups_are_misses() -> None:
    with rig({"lookups_max": 1}) as made:
        made.pool.go_on.clear()
        for index in range(4):
            made.add([index + 3, *PROMPT], outputs=1)
        made.pool.go_on.set()
        run(made)
        assert counts(made)["misses_full"] >= 2
        made.check_end()


@MODES
@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_load_that_fails_is_computed_and_not_tried_again(mode: str, good: int) -> None:
    with rig({"load_mode": mode}) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        before = dict(made.pool.chunks)
        made.sync_good = lambda job: good
        name = made.add(PROMPT, outputs=4)
        made.wait_for_lookups()
        made.step()
        if mode == "async":
            made.end_load(name, good)
            made.step()
        # What the pool says has not changed.
        assert matched(made, name)[0] in ({0} if good == 0 else {good * CHUNK, 0})
        run(made)
        assert made.pool.chunks == before
        assert counts(made)["hits"] <= 2
        made.check_end()


def test_chunks_of_a_failed_load_are_saved_once_they_are_computed() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT, outputs=4)
        made.wait_for_lookups()
        made.step()
        lost = list(made.pool.chunks)[2]
        del made.pool.chunks[lost]
        made.end_load(name)
        run(made)
        assert lost in made.pool.chunks
        made.check_end()


def test_a_request_aborted_while_it_loads_is_told_to_the_workers() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT, outputs=1)
        made.wait_for_lookups()
        made.step()
        assert name in made.loads
        made.abort(name)
        output = made.scheduler.schedule()
        assert output.kv_connector_metadata.cancelled == [name]
        made.scheduler.update_from_output(output, made.execute(output))
        assert made.blocks.get_num_free_blocks() < made.free_at_first
        made.end_load(name, 0)
        made.step()
        assert made.blocks.get_num_free_blocks() == made.free_at_first
        made.check_end()


def test_blocks_of_a_save_outlive_their_request() -> None:
    with rig(blocks=12) as made:
        made.add(PROMPT, outputs=1)
        made.wait_for_lookups()
        made.step()
        made.step()
        assert not made.scheduler.running
        assert made.scheduler.has_requests()
        assert made.blocks.get_num_free_blocks() == made.free_at_first - 6
        # Another one finds too little room, and cannot have these blocks.
        made.add([5, *PROMPT], outputs=1)
        made.wait_for_lookups()
        made.step()
        made.check_end()
        assert len(made.pool.chunks) == 6


def test_saves_keep_no_more_blocks_than_they_may() -> None:
    with rig({"saving_blocks_max": 0.1}, blocks=64) as made:
        made.add(PROMPT * 3, outputs=30)
        most = 0
        for _ in range(60):
            made.wait_for_lookups()
            made.step()
            most = max(most, made.connector._scheduler._saves.pinned_blocks)
        assert 0 < most <= 6
        made.check_end()
        # What did not fit while it ran was tried again, or is counted.
        dropped = counts(made)["chunks_dropped_full"]
        assert dropped > 0
        assert dropped + len(made.pool.chunks) == (300 + 29) // CHUNK


def test_what_is_on_its_way_is_not_saved_again() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=20)
        made.add(PROMPT, outputs=20)
        while not made.saves:
            made.wait_for_lookups()
            made.step()
        keys = [
            job.hashes[32 * at : 32 * at + 32] for job in made.saves.values() for at in range(len(job.hashes) // 32)
        ]
        assert len(keys) == len(set(keys))
        made.check_end()


def test_what_the_pool_has_lost_is_saved_again() -> None:
    with rig(kv_events=True) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        made.pool.chunks.clear()
        list(made.connector.take_events())
        made.add(PROMPT, outputs=1)
        run(made)
        assert len(made.pool.chunks) == 3
        made.check_end()


def test_what_could_not_be_saved_is_not_known() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made, saved=False)
        assert not made.pool.chunks
        made.add(PROMPT, outputs=1)
        run(made)
        assert len(made.pool.chunks) == 3
        made.check_end()


def test_only_prompts_are_saved_where_that_is_asked_for() -> None:
    with rig({"save_mode": "prompt"}) as made:
        made.add(PROMPT, outputs=40)
        run(made)
        assert len(made.pool.chunks) == 3
        made.check_end()


@pytest.mark.parametrize("extra", [{"load_mode": "off"}, {"save_mode": "off"}])
def test_what_is_off_is_not_done(extra: dict[str, str]) -> None:
    with rig(extra) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT, outputs=1)
        assert matched(made, name) == (0, False)
        assert bool(made.pool.chunks) == ("load_mode" in extra)
        made.check_end()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(role: str) -> None:
    with rig(role=role) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        assert bool(made.pool.chunks) == (role == "kv_producer")
        assert bool(made.pool.asked) == (role == "kv_consumer")
        made.check_end()


def test_small_loads_are_not_begun() -> None:
    with rig({"load_tokens_min": 97}) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT, outputs=1)
        assert matched(made, name) == (0, False)
        made.check_end()


def test_salts_and_adapters_do_not_share() -> None:
    from vllm.lora.request import LoRARequest

    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        assert matched(made, made.add(PROMPT, outputs=1, cache_salt=SALT)) == (0, False)
        adapter = LoRARequest("adapter", 1, "/nowhere")
        assert matched(made, made.add(PROMPT, outputs=1, lora_request=adapter)) == (0, False)
        run(made)
        assert len(made.pool.chunks) == 9
        fresh(made)
        assert matched(made, made.add(PROMPT, outputs=1, cache_salt=SALT)) == (96, True)
        made.check_end()


@pytest.mark.parametrize("mode", ["async", "prefetch"])
def test_requests_of_an_adapter_that_changes_use_no_pool(mode: str, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    with rig({"load_mode": mode}) as made:
        made.add(PROMPT, outputs=1, lora_request=adapter)
        run(made)
        assert len(made.pool.chunks) == 3
        fresh(made)
        asked = made.add(PROMPT, outputs=1, lora_request=adapter)
        # Looked up, and in one mode on its way, when it changes.
        if mode == "async":
            assert matched(made, asked) == (96, True)
        else:
            made.wait_for_lookups()
            made.step()
            assert made.fetches
        begun = made.add(PROMPT[1:], outputs=40, lora_request=adapter)
        weights.write_bytes(b"other weights")
        last = made.add(PROMPT, outputs=1, lora_request=adapter)
        for name in (asked, begun, last):
            assert matched(made, name) == (0, False)
        run(made)
        assert len(made.pool.chunks) == 3
        assert made.counts["hits"] == 0
        # With another number it is another one, and others were never concerned.
        fresh(made)
        made.add(PROMPT, outputs=1, lora_request=LoRARequest("adapter", 2, str(tmp_path)))
        made.add(PROMPT, outputs=1)
        run(made)
        assert len(made.pool.chunks) == 9
        made.check_end()


def test_a_request_that_wants_no_cache_is_not_looked_up() -> None:
    with rig() as made:
        name = made.add(PROMPT, outputs=1, sampling={"skip_reading_prefix_cache": True})
        assert matched(made, name) == (0, False)
        assert made.pool.asked == 0
        made.check_end()


def test_a_lease_that_ends_is_asked_for_anew() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        fresh(made)
        name = made.add(PROMPT, outputs=1)
        made.wait_for_lookups()
        tracked = made.connector._scheduler._tracked[name]
        tracked.lookup.until = 0.0
        assert made.connector.get_num_new_matched_tokens(tracked.request, 0) in ((None, False), (96, True))
        made.wait_for_lookups()
        assert made.pool.asked == 3
        made.check_end()


def test_after_a_reset_nothing_old_is_found() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        before = dict(made.pool.chunks)
        running = made.add([4, *PROMPT], outputs=60)
        made.wait_for_lookups()
        made.step()
        made.step()
        assert made.reset(reset_running_requests=False, reset_connector=True) is False
        made.abort(running)
        made.step()
        for job_id in list(made.saves):
            made.end_save(job_id)
        made.step()
        assert made.reset(reset_connector=True)
        name = made.add(PROMPT, outputs=1)
        assert matched(made, name) == (0, False)
        run(made)
        assert before.items() <= made.pool.chunks.items()
        fresh(made)
        assert matched(made, made.add(PROMPT, outputs=1)) == (96, True)
        made.check_end()


def test_events_tell_what_the_pool_has() -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    with rig(kv_events=True) as made:
        made.add(PROMPT, outputs=1)
        events = []
        original = made.connector.take_events
        made.connector.take_events = lambda: events.extend(taken := list(original())) or taken
        run(made)
        made.step()
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert [event.medium for event in stored] == ["POOL"]
        assert list(stored[0].token_ids) == PROMPT[:96]
        assert len(stored[0].block_hashes) == 6
        assert stored[0].parent_block_hash is None
        made.pool.chunks.clear()
        made.add(PROMPT, outputs=1)
        run(made)
        removed = [event for event in events if isinstance(event, BlockRemoved)]
        assert [one for event in removed for one in event.block_hashes] == list(stored[0].block_hashes)
        made.check_end()


def test_every_worker_has_to_end_a_save() -> None:
    with rig(parallel={"tensor_parallel_size": 2}) as made:
        made.workers = 1
        made.add(PROMPT, outputs=1)
        for _ in range(3):
            made.wait_for_lookups()
            made.step()
        (job,) = made.saves.values()
        made.end_save(job.job_id)
        made.step()
        assert made.connector._scheduler._saves.pinned_blocks == 6
        made.saves[job.job_id] = job
        made.end_save(job.job_id)
        made.step()
        assert made.connector._scheduler._saves.pinned_blocks == 0
        made.check_end()


def test_statistics_are_given_once_and_an_idle_engine_has_none() -> None:
    with rig() as made:
        made.add(PROMPT, outputs=1)
        run(made)
        for _ in range(3):
            made.step()
        assert made.connector.get_kv_connector_stats() is None


def test_a_pool_that_never_comes_costs_nothing() -> None:
    class Never(Pool):
        pass

    with rig(pool=Never()) as made:
        made.connector._scheduler._link._away_until = float("inf")
        made.add(PROMPT, outputs=40)
        run(made)
        assert made.pool.asked == 0
        made.check_end()
