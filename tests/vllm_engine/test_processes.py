# SPDX-License-Identifier: Apache-2.0
"""Engines in several processes have one pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_testing.driver import EngineProcess
from vllm_testing.engines import Engine, connector_of
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64
Plain = Callable[..., list[int]]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_another_process_with_other_hashes_of_python_finds_it(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], algorithm: str
) -> None:
    connector = connector_of(shared_cluster, **tenant)
    same = prompt(300, "seeds")
    with Engine(llama, connector, prefix_caching_hash_algo=algorithm) as engine:
        assert engine.ask(same)[0].cached == 0
        engine.settle()
    # Python's own hashes are others there. With PYTHONHASHSEED set vLLM's would be too, and the connector says so.
    with EngineProcess(llama, connector, prefix_caching_hash_algo=algorithm) as other:
        assert other.hash_of("text") != hash("text")
        answer = other.ask(same)[0]
        assert (answer["tokens"], answer["cached"]) == (plain(same), 4 * CHUNK)
        other.settle()


def test_with_another_seed_of_hashes_nothing_is_shared_and_the_log_says_why(
    llama: Path,
    shared_cluster: LocalCluster,
    plain: Plain,
    tenant: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connector = connector_of(shared_cluster, **tenant)
    same = prompt(300, "seeds")
    for seed, cached in (("1", 0), ("2", 0), ("1", 4 * CHUNK)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        caplog.clear()
        with Engine(llama, connector) as engine:
            answer = engine.ask(same)[0]
            assert (answer.tokens, answer.cached) == (plain(same), cached)
            engine.settle()
        assert "PYTHONHASHSEED" in caplog.text


def test_an_engine_whose_hashes_are_not_chained_sha256_is_refused(
    llama: Path, shared_cluster: LocalCluster, tenant: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match="sha256"):
        Engine(llama, connector_of(shared_cluster, **tenant), prefix_caching_hash_algo="xxhash")


def test_both_ranks_of_a_tensor_parallel_engine_load_their_part(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any]
) -> None:
    connector = connector_of(shared_cluster, **tenant)
    same = prompt(300, "ranks")
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    with EngineProcess(llama, connector, environment=environment, tensor_parallel_size=2) as engine:
        answer = engine.ask(same)[0]
        assert (answer["tokens"], answer["cached"]) == (plain(same), 0)
        end = time.monotonic() + 150
        # What its own cache has is a block more.
        while answer["cached"] != 4 * CHUNK:
            assert time.monotonic() < end, answer
            engine.forget()
            answer = engine.ask(same)[0]
            assert answer["tokens"] == plain(same)
