# SPDX-License-Identifier: Apache-2.0
"""Random operations on an engine and its pool. More of them: ``python -m vllm_testing.random_run``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_testing.gates import Puts
from vllm_testing.random_run import RandomRun

from moonpool.cluster import local_cluster

OPERATIONS = 120


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_wrong_or_left_whatever_happens(
    llama: Path, plain: Callable[..., list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_cluster(nodes=2, dram="16MiB") as cluster:
        run = RandomRun(llama, cluster, plain, seed, Puts(monkeypatch))
        run.run(OPERATIONS)
    assert run.done["tokens cached"]
