# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""Who may use whose KV, and which worker has which part of it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing import configs

from moonpool.connector import compat
from moonpool.connector.namespace import check_supported, fingerprint_of, namespace_of, shard_plan
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.shards import ShardPlan
from moonpool.errors import ConfigError

pytestmark = THEIR_WARNINGS


@pytest.fixture(scope="module")
def config() -> Any:
    return configs.vllm_config()


def name(config: Any, layout: str = "LBNHC", **settings: Any) -> str:
    return namespace_of(config, configs.cache_config(config), ConnectorSettings.load(settings), layout)


def changed(config: Any, **fields: Any) -> Any:
    """Return the config with other fields, by ``<part>__<field>``."""
    other = copy.copy(config)
    for path, value in fields.items():
        part, field = path.split("__")
        setattr(other, part, copy.copy(getattr(other, part)))
        setattr(getattr(other, part), field, value)
    return other


def test_it_is_the_same_for_the_same(config: Any) -> None:
    assert name(config) == name(configs.vllm_config())
    assert len(name(config).encode()) <= 255
    assert name(config).startswith("vllm/default/")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_config__dtype": "bfloat16"},
        {"model_config__model": "other/model"},
        {"model_config__revision": "v2"},
        {"model_config__quantization": "fp8"},
        {"model_config__seed": 1, "load_config__load_format": "dummy"},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__block_size": 32},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_everything_that_changes_the_bytes_is_in_it(config: Any, fields: dict[str, Any]) -> None:
    assert name(changed(config, **fields)) != name(config)


def test_the_rest_of_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    different = {
        name(config),
        name(config, layout="LBHNC"),
        name(config, tenant="other"),
        name(config, revision="other"),
        name(config, chunk_tokens=512),
    }
    # vLLM's first hash depends on it: with another one, no hash is the same.
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    different.add(name(config))
    assert len(different) == 6


def test_the_content_of_a_model_is_in_it_and_not_only_its_name(config: Any) -> None:
    other = changed(config)
    other.model_config = copy.copy(config.model_config)
    other.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    other.model_config.hf_config.rms_norm_eps = 0.5
    assert name(other) != name(config)


def test_a_worker_with_layers_of_its_own_has_the_same(config: Any) -> None:
    mine = configs.cache_config(config)
    mine.kv_cache_groups[0].layer_names = ["model.layers.17"]
    settings = ConnectorSettings()
    assert namespace_of(config, mine, settings, "x") == namespace_of(
        config, configs.cache_config(config), settings, "x"
    )


def test_a_long_name_fits(config: Any) -> None:
    one = name(changed(config, model_config__model="/models/" + 300 * "é"), tenant=300 * "t")
    assert len(one.encode()) <= 255
    assert one != name(changed(config, model_config__model="/models/" + 301 * "é"), tenant=300 * "t")


def test_nothing_in_it_has_an_address(config: Any) -> None:
    other = changed(config)
    other.model_config = copy.copy(config.model_config)
    other.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    other.model_config.hf_config.odd = object()
    assert " at 0x" not in str(fingerprint_of(other, configs.cache_config(other), ConnectorSettings(), "x"))


# ---------------------------------------------------------------- shards


def plans(config: Any, tp: int, pp: int = 1, replicas: int | None = None) -> list[ShardPlan]:
    made = []
    for rank in range(tp * pp):
        one = changed(
            config,
            parallel_config__tensor_parallel_size=tp,
            parallel_config__pipeline_parallel_size=pp,
            parallel_config__rank=rank,
        )
        cache = configs.cache_config(one)
        if replicas is None:
            cache = _Older(cache)
        else:
            cache.kv_tp_replicas = replicas
        made.append(shard_plan(one, cache))
    return made


class _Older:
    """A cache config of a version that does not know of replicas."""

    def __init__(self, cache: Any) -> None:
        self.kv_cache_groups = cache.kv_cache_groups


def test_each_worker_has_its_heads(config: Any) -> None:
    assert plans(config, 2, replicas=1) == [ShardPlan(0, 2, writes=True), ShardPlan(1, 2, writes=True)]


@pytest.mark.parametrize("replicas", [2, None])
def test_of_workers_with_the_same_heads_one_writes(config: Any, replicas: int | None) -> None:
    # Two heads on four workers.
    assert plans(config, 4, replicas=replicas) == [
        ShardPlan(0, 2, writes=True),
        ShardPlan(0, 2, writes=False),
        ShardPlan(1, 2, writes=True),
        ShardPlan(1, 2, writes=False),
    ]


def test_of_one_latent_there_is_one_writer() -> None:
    mla = configs.vllm_config(model=configs.DEEPSEEK)
    assert mla.model_config.use_mla
    assert plans(mla, 2) == [ShardPlan(0, 1, writes=True), ShardPlan(0, 1, writes=False)]


def test_each_stage_has_its_layers(config: Any) -> None:
    assert plans(config, 2, 2, replicas=1) == [ShardPlan(shard, 4, writes=True) for shard in range(4)]


@pytest.mark.parametrize(("tp", "pp", "replicas"), [(1, 1, 1), (8, 1, 4), (4, 2, 2), (2, 3, 2), (8, 2, 1)])
def test_every_shard_has_one_writer(config: Any, tp: int, pp: int, replicas: int) -> None:
    made = plans(config, tp, pp, replicas)
    written = [plan.shard for plan in made if plan.writes]
    assert sorted(written) == list(range(made[0].shards))
    assert {plan.shard for plan in made} == set(written)


# ---------------------------------------------------------------- refusals


def refusal(config: Any, cache: Any = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_supported(config, cache or configs.cache_config(config), ConnectorSettings.load(settings))
    assert "Try: " in str(caught.value)
    return str(caught.value)


def test_what_would_be_wrong_is_refused_with_what_to_do(config: Any) -> None:
    check_supported(config, configs.cache_config(config), ConnectorSettings())
    assert "--prefix-caching-hash-algo sha256" in refusal(
        changed(config, cache_config__prefix_caching_hash_algo="xxhash")
    )
    assert '"chunk_tokens": 96' in refusal(config, chunk_tokens=100)
    assert "--decode-context-parallel-size 1" in refusal(
        changed(config, parallel_config__decode_context_parallel_size=2)
    )
    assert "--prefill-context-parallel-size 1" in refusal(
        changed(config, parallel_config__prefill_context_parallel_size=2)
    )
    assert "--disable-hybrid-kv-cache-manager" in refusal(config, configs.cache_config(config, groups=2))


def test_a_step_that_runs_ahead_of_a_load_it_needs_is_refused() -> None:
    ahead = configs.vllm_config(ahead=True)
    check_supported(ahead, configs.cache_config(ahead), ConnectorSettings())
    for mode in ("sync", "layerwise"):
        assert "--no-async-scheduling" in refusal(ahead, load_mode=mode)


def test_state_layers_are_refused(config: Any) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    cache = configs.cache_config(config)
    cache.kv_cache_groups[0].kv_cache_spec = MambaSpec(block_size=16, shapes=((1,),), dtypes=())
    assert "MambaSpec" in refusal(config, cache)


@pytest.mark.parametrize(("version", "fine"), [("0.28.0", False), ("0.29.0", True), ("0.33.1", True), ("dev", True)])
def test_versions(version: str, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_version", lambda: version)
    check: Callable[[], None] = compat.check_version
    if fine:
        check()
    else:
        with pytest.raises(ConfigError, match=r"0\.29 or newer"):
            check()


def test_the_installed_version_is_known() -> None:
    assert compat._version()[0].isdigit()
    assert "PYTHONHASHSEED" not in os.environ
