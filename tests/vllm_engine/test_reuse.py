# SPDX-License-Identifier: Apache-2.0
"""What the pool has is not computed again, and nobody can tell by the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_testing.engines import Engine, connector_of
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64
BLOCK = 32
Plain = Callable[..., list[int]]


@pytest.fixture(params=["sync", "layerwise", "async", "prefetch"])
def load_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("save_mode", ["all", "prompt"])
def test_the_tokens_are_those_of_an_engine_without_a_pool(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str, save_mode: str
) -> None:
    connector = connector_of(shared_cluster, load_mode=load_mode, save_mode=save_mode, **tenant)
    # Ends in the middle of a block, at the end of a block, of a chunk, and one token after that.
    lengths = [3 * CHUNK + 5, 3 * CHUNK + BLOCK, 3 * CHUNK, 3 * CHUNK + 1]
    prompts = [prompt(length, save_mode, load_mode, length) for length in lengths]
    expected = [plain(one, 12) for one in prompts]
    with Engine(llama, connector) as engine:
        first = engine.ask(*prompts, tokens=12)
        assert [answer.tokens for answer in first] == expected
        assert [answer.cached for answer in first] == [0] * 4
        engine.settle()
        assert engine.forget()
        again = engine.ask(*prompts, tokens=12)
        assert [answer.tokens for answer in again] == expected
        # Of a prompt that the pool has whole, the last block is computed all the same.
        assert [answer.cached for answer in again] == [3 * CHUNK, 3 * CHUNK, 3 * CHUNK - BLOCK, 3 * CHUNK]
        engine.settle()


def test_a_second_turn_finds_what_the_first_has_generated(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str
) -> None:
    first = prompt(CHUNK + 10, "turns", load_mode)
    said = plain(first, 2 * CHUNK)
    second = prompt(20, "more", after=[*first, *said])
    expected = plain(second, 12)
    for save_mode, cached in (("prompt", CHUNK), ("all", 3 * CHUNK)):
        connector = connector_of(
            shared_cluster, load_mode=load_mode, save_mode=save_mode, tenant=tenant["tenant"] + save_mode
        )
        with Engine(llama, connector) as engine:
            assert engine.ask(first, tokens=2 * CHUNK)[0].tokens == said
            engine.settle()
            engine.forget()
            answer = engine.ask(second, tokens=12)[0]
            assert (answer.tokens, answer.cached) == (expected, cached)
            engine.settle()


def test_a_prompt_that_is_computed_in_parts_is_saved_and_found(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str
) -> None:
    connector = connector_of(shared_cluster, load_mode=load_mode, **tenant)
    prompts = [prompt(400, "parts", index) for index in range(3)]
    with Engine(llama, connector, max_num_batched_tokens=96) as engine:
        for cached in (0, 6 * CHUNK):
            answers = engine.ask(*prompts)
            assert [answer.tokens for answer in answers] == [plain(one) for one in prompts]
            assert [answer.cached for answer in answers] == [cached] * 3
            engine.settle()
            engine.forget()


def test_what_the_engine_has_itself_is_not_loaded(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str
) -> None:
    connector = connector_of(shared_cluster, load_mode=load_mode, **tenant)
    long = prompt(6 * CHUNK + 8, "partly", load_mode)
    with Engine(llama, connector) as engine:
        engine.ask(long)
        engine.settle()
        engine.forget()
        # In the middle of a chunk, so what is loaded begins there.
        engine.ask(long[: 2 * CHUNK + BLOCK], tokens=1)
        engine.settle()
        computed: list[int] = []
        loaded = engine.connector.get_num_new_matched_tokens
        engine.scheduler.connector.get_num_new_matched_tokens = lambda request, local: (
            computed.append(local) or loaded(request, local)
        )
        answer = engine.ask(long)[0]
        assert computed[0] >= 2 * CHUNK
        assert (answer.tokens, answer.cached) == (plain(long), 6 * CHUNK)
        engine.settle()


@pytest.mark.parametrize(("setting", "loads", "saves"), [("load_mode", False, True), ("save_mode", True, False)])
def test_each_way_can_be_turned_off(
    llama: Path,
    shared_cluster: LocalCluster,
    plain: Plain,
    tenant: dict[str, Any],
    setting: str,
    loads: bool,
    saves: bool,
) -> None:
    there, new = prompt(200, "there", setting), prompt(200, "new", setting)
    with Engine(llama, connector_of(shared_cluster, **tenant)) as engine:
        engine.ask(there)
        engine.settle()
    with Engine(llama, connector_of(shared_cluster, **tenant, **{setting: "off"})) as engine:
        answers = engine.ask(there, new)
        assert [answer.tokens for answer in answers] == [plain(there), plain(new)]
        assert [answer.cached for answer in answers] == [3 * CHUNK if loads else 0, 0]
        engine.settle()
    with Engine(llama, connector_of(shared_cluster, **tenant)) as engine:
        assert engine.ask(new)[0].cached == (3 * CHUNK if saves else 0)
        engine.settle()


def test_requests_with_another_salt_share_nothing(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any]
) -> None:
    same = prompt(200, "salt")
    with Engine(llama, connector_of(shared_cluster, **tenant)) as engine:
        for salt, cached in (("a", 0), ("b", 0), (None, 0), ("a", 3 * CHUNK), (None, 3 * CHUNK)):
            answer = engine.ask(same, salt=salt)[0]
            assert (answer.tokens, answer.cached) == (plain(same), cached), salt
            engine.settle()
            engine.forget()


def test_the_cache_of_the_engine_can_be_reset_at_any_time(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str
) -> None:
    same = prompt(300, "reset")
    with Engine(llama, connector_of(shared_cluster, load_mode=load_mode, **tenant)) as engine:
        for _ in range(3):
            name = engine.add(same, 12)
            while engine.answers[name].finished is None:
                engine.step()
                # Refused while requests hold blocks, and of no harm.
                engine.forget(connector=True)
            assert engine.answers[name].tokens == plain(same, 12)
        engine.settle()
        assert engine.forget(connector=True)
        assert engine.ask(same, tokens=12)[0].tokens == plain(same, 12)
        engine.settle()


def test_many_requests_at_once(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str
) -> None:
    common = prompt(2 * CHUNK, "common")
    prompts = [prompt(30 + 7 * index, index, after=common) for index in range(8)]
    connector = connector_of(shared_cluster, load_mode=load_mode, **tenant)
    with Engine(llama, connector, blocks=80) as engine:
        for _ in range(3):
            assert [answer.tokens for answer in engine.ask(*prompts)] == [plain(one) for one in prompts]
            engine.settle()
            engine.forget()
        assert engine.ask(prompts[-1])[0].cached == 2 * CHUNK + (30 + 7 * 7) // CHUNK * CHUNK
        engine.settle()


def test_it_is_one_of_several_connectors(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str
) -> None:
    ours = connector_of(shared_cluster, load_mode=load_mode, **tenant)
    other = connector_of(shared_cluster, load_mode="off", save_mode="off", **tenant)
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }
    same = prompt(300, "several")
    with Engine(llama, both) as engine:
        for cached in (0, 4 * CHUNK):
            answer = engine.ask(same)[0]
            assert (answer.tokens, answer.cached) == (plain(same), cached)
            engine.settle()
            engine.forget()
