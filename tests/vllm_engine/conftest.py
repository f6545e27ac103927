# SPDX-License-Identifier: Apache-2.0
"""Models, pools, and what an engine without a connector says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_testing import models

from moonpool.cluster import LocalCluster, local_cluster


def pytest_configure(config: pytest.Config) -> None:
    # vLLM, torch and what they use warn of themselves. What is never closed is an error all the same.
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning", "RuntimeWarning"):
        config.addinivalue_line("filterwarnings", f"default::{category}")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mla(tmp_path_factory.mktemp("mla"))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[LocalCluster]:
    """For tests that break nothing."""
    with local_cluster(nodes=1, dram="256MiB") as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """For tests that break it."""
    with local_cluster(nodes=1, dram="64MiB") as its:
        yield its


@pytest.fixture(scope="session")
def plain(llama: Path) -> Iterator[Callable[..., list[int]]]:
    """What an engine without connector and without a prefix cache generates: `plain(prompt, tokens)`."""
    from vllm_testing.driver import EngineProcess

    known: dict[str, list[int]] = {}
    with EngineProcess(llama, enable_prefix_caching=False) as engine:

        def ask(prompt: Iterable[int], tokens: int = 8) -> list[int]:
            prompt = list(prompt)
            name = json.dumps([prompt, tokens])
            if name not in known:
                known[name] = engine.ask(prompt, tokens=tokens)[0]["tokens"]
            return known[name]

        yield ask


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings that keep what a test stores apart from all else in the pool."""
    return {"tenant": request.node.name}
