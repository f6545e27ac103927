# SPDX-License-Identifier: Apache-2.0
"""Engines in several processes have one pool."""

from __future__ import annotations

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
def test_another_process_with_another_hash_seed_finds_it(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], algorithm: str
) -> None:
    connector = connector_of(shared_cluster, **tenant)
    same = prompt(300, "seeds")
    with Engine(llama, connector, prefix_caching_hash_algo=algorithm) as engine:
        assert engine.ask(same)[0].cached == 0
        engine.settle()
    with EngineProcess(
        llama, connector, environment={"PYTHONHASHSEED": "7"}, prefix_caching_hash_algo=algorithm
    ) as other:
        answer = other.ask(same)[0]
        assert (answer["tokens"], answer["cached"]) == (plain(same), 4 * CHUNK)
        other.settle()


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
        first = engine.ask(same)[0]
        assert (first["tokens"], first["cached"]) == (plain(same), 0)
        # Its own cache is dropped once the saves have ended, which keep their blocks.
        assert engine.forget()
        again = engine.ask(same)[0]
        assert (again["tokens"], again["cached"]) == (plain(same), 4 * CHUNK)
