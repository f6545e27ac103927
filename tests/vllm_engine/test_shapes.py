# SPDX-License-Identifier: Apache-2.0
"""Engines of every shape on one pool: each finds its own, and nothing of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_testing import models
from vllm_testing.engines import Engine, connector_of
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64


def test_engines_of_other_types_blocks_and_weights_share_a_pool_and_nothing_in_it(
    llama: Path, shared_cluster: LocalCluster, tenant: dict[str, Any], tmp_path: Path
) -> None:
    same = prompt(4 * CHUNK + 20, "shapes")
    other = models.llama(tmp_path / "other", seed=1)
    shapes: list[tuple[Path, dict[str, Any]]] = [
        (llama, {}),
        (llama, {"dtype": "bfloat16"}),
        (llama, {"block_size": 64}),
        (other, {}),
    ]
    tokens = []
    for model, options in shapes:
        with Engine(model, connector_of(shared_cluster, **tenant), **options) as engine:
            answer = engine.ask(same)[0]
            assert answer.cached == 0, (model, options)
            tokens.append(answer.tokens)
            engine.settle()
    for (model, options), expected in zip(shapes, tokens, strict=True):
        with Engine(model, connector_of(shared_cluster, **tenant), **options) as engine:
            answer = engine.ask(same)[0]
            assert (answer.tokens, answer.cached) == (expected, 4 * CHUNK), (model, options)
            engine.settle()


def test_a_model_with_latent_attention(mla: Path, shared_cluster: LocalCluster, tenant: dict[str, Any]) -> None:
    # On a CPU vLLM computes the prompts of such a model one by one, and none behind a prefix, but single tokens it does.
    prompts = [prompt(length, "latent", length) for length in (3 * CHUNK + 1, 2 * CHUNK + 1)]
    with Engine(mla, None, block_size=16) as engine:
        expected = [engine.ask(one, tokens=12)[0].tokens for one in prompts]
    with Engine(mla, connector_of(shared_cluster, load_mode="async", **tenant), block_size=16) as engine:
        for round_ in range(2):
            for one, tokens in zip(prompts, expected, strict=True):
                answer = engine.ask(one, tokens=12)[0]
                assert (answer.tokens, answer.cached) == (tokens, (len(one) - 1) * round_)
                engine.settle()
                engine.forget()


@pytest.mark.parametrize("policy", ["fail", None])
def test_a_load_that_fails_is_computed_whatever_the_policy_was(
    llama: Path, shared_cluster: LocalCluster, tenant: dict[str, Any], policy: str | None
) -> None:
    connector = connector_of(shared_cluster, **tenant)
    del connector["kv_load_failure_policy"]
    if policy is not None:
        connector["kv_load_failure_policy"] = policy
    try:
        engine = Engine(llama, connector)
    except ValueError as refused:
        assert '"kv_load_failure_policy": "recompute"' in str(refused)
    else:
        with engine:
            assert engine.engine.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
            assert engine.scheduler.recompute_kv_load_failures
