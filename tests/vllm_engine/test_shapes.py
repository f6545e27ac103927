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
from moonpool.errors import ConfigError

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
    # On a CPU vLLM computes the prompts of such a model one by one, and behind a prefix a single token only, as it
    # computes those that it generates, which is not quite as in a prompt. So here it is one of those.
    first = prompt(3 * CHUNK, "latent")
    # Where a processor has AMX, vLLM would use it, and that only takes 16 bits.
    options: dict[str, Any] = {"block_size": 16, "attention_backend": "CPU_MLA"}
    with Engine(mla, **options) as engine:
        expected = engine.ask(first, tokens=12)[0].tokens
    with Engine(mla, connector_of(shared_cluster, **tenant), **options) as engine:
        assert engine.ask(first, tokens=12)[0].tokens == expected
        engine.settle()
        engine.forget()
        answer = engine.ask([*first, expected[0]], tokens=11)[0]
        assert (answer.tokens, answer.cached) == (expected[1:], 3 * CHUNK)
        engine.settle()


@pytest.mark.parametrize("policy", ["fail", None])
def test_what_cannot_be_loaded_is_computed_whatever_policy_was_set(
    llama: Path, shared_cluster: LocalCluster, tenant: dict[str, Any], policy: str | None
) -> None:
    connector = connector_of(shared_cluster, **tenant)
    del connector["kv_load_failure_policy"]
    if policy is not None:
        connector["kv_load_failure_policy"] = policy
    with Engine(llama, connector) as engine:
        assert engine.engine.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert engine.scheduler.recompute_kv_load_failures


def test_a_policy_that_is_not_ours_to_set_is_refused(
    llama: Path, shared_cluster: LocalCluster, tenant: dict[str, Any]
) -> None:
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector_of(shared_cluster, **tenant)]},
    }
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        Engine(llama, both)
