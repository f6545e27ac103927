# SPDX-License-Identifier: Apache-2.0
"""One engine computes prompts, another one goes on with them, and nobody can tell by the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_testing.driver import EngineProcess
from vllm_testing.engines import Engine, connector_of
from vllm_testing.handover_run import HandOverRun
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster, local_cluster

BLOCK = 32
CHUNK = 4 * BLOCK
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
Plain = Callable[..., list[int]]


def connector(cluster: LocalCluster, role: str, **settings: Any) -> dict[str, Any]:
    settings = {"tenant": "handover", "chunk_tokens": CHUNK, "saving_blocks_max": 1.0, **settings}
    return {**connector_of(cluster, **settings), "kv_role": role}


@pytest.fixture(scope="module")
def prefill(llama: Path, shared_cluster: LocalCluster) -> Iterator[EngineProcess]:
    # All that it has is kept for those who go on with it, for as long as a test needs.
    lends = {"peer_listen": "127.0.0.1:0", "peer_blocks_max": 1.0, "peer_lease": 60.0}
    with EngineProcess(llama, connector(shared_cluster, "kv_producer", **lends)) as engine:
        yield engine


def handed(engine: EngineProcess, *prompts: list[int]) -> list[Any]:
    """Compute prompts and return what the engine is given that goes on with them."""
    answers = engine.ask(*prompts, tokens=1, params=[WANTED] * len(prompts))
    for answer in answers:
        # vLLM would tell how much of the prompt the first engine had cached, instead of what this one has.
        (answer["params"] or {}).pop("remote_prefill_cached_tokens", None)
    return [answer["params"] for answer in answers]


def test_prompts_of_every_remainder_go_on_in_another_engine(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, prefill: EngineProcess
) -> None:
    lengths = [CHUNK + blocks * BLOCK + more for blocks in range(5) for more in (0, 1, BLOCK - 1)] + [1, 31, 32, 33, 65]
    prompts = [prompt(length, "remainder", length) for length in lengths]
    expected = [plain(one, 4) for one in prompts]
    # The last one reads nothing straight from the other engine, and gives nothing back.
    for load_mode, peer_reads in (("async", True), ("prefetch", True), ("layerwise", False)):
        params = handed(prefill, *prompts)
        assert [bool(one) for one in params] == [length >= BLOCK for length in lengths]
        settings = {"load_mode": load_mode, "peer_reads": peer_reads, "handover_wait": 30.0}
        with Engine(llama, connector(shared_cluster, "kv_consumer", **settings)) as engine:
            answers = engine.ask(*prompts, tokens=4, params=params)
            assert [answer.tokens for answer in answers] == expected
            assert [answer.cached for answer in answers] == [(length - 1) // BLOCK * BLOCK for length in lengths]
            engine.settle()
            counts = engine.counts()
            assert counts["handovers_taken"] == sum(length > BLOCK for length in lengths)
            assert counts["loads_direct"] == (counts["handovers_taken"] if peer_reads else 0)
            assert counts["handovers_late"] == counts["handovers_refused"] == 0
        if peer_reads:
            # It was told that nobody needs any of it.
            prefill.settle()


def test_engines_that_are_killed_and_stopped_take_no_request_along(llama: Path, plain: Plain) -> None:
    """More of them: ``make soak-handover``."""
    with local_cluster(nodes=1, dram="64MiB") as cluster:
        run = HandOverRun(llama, cluster, plain, seed=57, faults=50)
        run.run(8)
    assert (run.done["stop handed over"], run.done["kill decoding"]) == (1, 1)
    assert run.done["handovers_taken"]
