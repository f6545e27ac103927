# SPDX-License-Identifier: Apache-2.0
"""Adapters on one pool: each finds what was computed with its weights, and nothing of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_testing import models
from vllm_testing.engines import Engine, connector_of
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64
Plain = Callable[..., list[int]]


@pytest.fixture(params=["sync", "layerwise", "async", "prefetch"])
def load_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_adapters_share_what_has_their_weights(
    llama: Path, shared_cluster: LocalCluster, plain: Plain, tenant: dict[str, Any], load_mode: str, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    same = prompt(3 * CHUNK + 20, "adapters")
    one, other = (models.adapter(tmp_path / name / "adapter", seed=seed) for seed, name in enumerate(("one", "other")))
    connector = connector_of(shared_cluster, load_mode=load_mode, **tenant)
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    requests = [None, LoRARequest("one", 1, str(one)), LoRARequest("other", 2, str(other))]
    with Engine(llama, connector, **options) as engine:
        answers = [engine.ask(same, lora=lora)[0] for lora in requests]
        assert [answer.cached for answer in answers] == [0, 0, 0]
        expected = [answer.tokens for answer in answers]
        assert expected[0] == plain(same)
        assert len(set(map(tuple, expected))) == 3
        engine.settle()
    with Engine(llama, connector, **options) as engine:
        answers = [engine.ask(same, lora=lora)[0] for lora in reversed(requests)]
        assert [answer.tokens for answer in reversed(answers)] == expected
        assert [answer.cached for answer in answers] == [3 * CHUNK] * 3
        engine.settle()
    # Another engine was given other weights at the same place, under the same name.
    models.adapter(one, seed=1)
    with Engine(llama, connector, **options) as engine:
        answer = engine.ask(same, lora=requests[1])[0]
        assert (answer.tokens, answer.cached) == (expected[2], 0)
        engine.settle()
