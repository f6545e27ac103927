# SPDX-License-Identifier: Apache-2.0
"""Which engines may use each other's KV, and which part of it each worker has.

vLLM's block hash stands for the tokens, the LoRA adapter, the images and the salt. It says nothing of the model, nor of
the form its KV has in the cache. All of that makes the namespace, so that what does not fit is not found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, Final

from moonpool.connector import compat
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.shards import ShardPlan
from moonpool.errors import ConfigError

__all__ = ["check_supported", "facts_of", "fingerprint_of", "hash_seed", "namespace_of", "shard_plan"]

#: Of what is in a chunk, and of what is in the fingerprint.
FORMAT: Final = 1
_NAMESPACE_MAX: Final = 255
_NAME_MAX: Final = 48
#: Two engines of one model that cannot hand requests over differ in one of these, nearly always.
_FACTS: Final = ("format", "dtype", "cache_dtype", "block_tokens", "chunk_tokens", "layout", "tp", "pp", "dcp")
#: Their hashes are 32 bytes, and collide for nobody who wants them to.
_ALGORITHMS: Final = ("sha256", "sha256_cbor")


def namespace_of(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, layout: str) -> str:
    """Return the namespace of the pool for this engine: the same in all its processes.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of the engine or of a worker.
        settings: of the connector.
        layout: of the cache, `compat.layout_of`.
    """
    text = json.dumps(fingerprint_of(vllm_config, kv_cache_config, settings, layout), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    head = "/".join(
        (
            "vllm",
            _name(settings.tenant),
            _name(model.model.rstrip("/").rpartition("/")[2]),
            f"{_dtype(model.dtype)}-kv-{_name(vllm_config.cache_config.cache_dtype)}",
            f"tp{parallel.tensor_parallel_size}pp{parallel.pipeline_parallel_size}",
        )
    )
    return f"{head[: _NAMESPACE_MAX - len(digest) - 1]}/{digest}"


def fingerprint_of(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, layout: str) -> dict[str, Any]:
    """Return everything that two engines must have in common to use each other's KV.

    Only what the scheduler and every worker see alike: the cache config of a worker names its own layers.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "format": FORMAT,
        "tenant": settings.tenant,
        "model": model.model,
        "revision": settings.revision or model.revision,
        "weights": _weights(vllm_config),
        "config": _plain(model.hf_config.to_dict()),
        "dtype": _dtype(model.dtype),
        "quantization": _plain(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "fp8": _fp8_kind(str(cache.cache_dtype)),
        "unquantized_layers": sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", ()))),
        "block_tokens": cache.block_size,
        "chunk_tokens": settings.chunk_tokens,
        "layout": layout,
        "platform": _platform(vllm_config),
        "hash": [cache.prefix_caching_hash_algo, hash_seed()],
        "tp": parallel.tensor_parallel_size,
        "replicas": compat.tp_replicas(vllm_config, kv_cache_config),
        "pp": [parallel.pipeline_parallel_size, os.environ.get("VLLM_PP_LAYER_PARTITION")],
        "dcp": parallel.decode_context_parallel_size,
        "groups": len(kv_cache_config.kv_cache_groups),
        "drafts": _drafts(vllm_config.speculative_config),
    }


def facts_of(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, layout: str) -> dict[str, Any]:
    """Return what of the fingerprint tells nothing of the model and who uses it."""
    every = fingerprint_of(vllm_config, kv_cache_config, settings, layout)
    return {name: every[name] for name in _FACTS}


def shard_plan(vllm_config: Any, kv_cache_config: Any) -> ShardPlan:
    """Return which part of a chunk this worker has: the layers of its pipeline stage, its heads of them."""
    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas = compat.tp_replicas(vllm_config, kv_cache_config)
    stage, rank = divmod(parallel.rank % (tp * pp), tp)
    parts = tp // replicas
    return ShardPlan(shard=stage * parts + rank // replicas, shards=pp * parts, writes=rank % replicas == 0)


def hash_seed() -> str:
    """Return what the first hash of vLLM's chain depends on. Engines with other ones have other hashes."""
    return os.environ.get("PYTHONHASHSEED", "")


def check_supported(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    """Refuse to start with what would be wrong, or never a hit.

    Raises:
        ConfigError: what it is, and what to do.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.prefix_caching_hash_algo not in _ALGORITHMS:
        raise ConfigError(
            f"blocks are hashed with {cache.prefix_caching_hash_algo}, whose hashes differ between processes",
            hint="--prefix-caching-hash-algo sha256",
        )
    if settings.chunk_tokens % cache.block_size:
        nearest = max(1, round(settings.chunk_tokens / cache.block_size)) * cache.block_size
        raise ConfigError(
            f"chunk_tokens is {settings.chunk_tokens}, which is no multiple of the block size {cache.block_size}",
            hint=f'"chunk_tokens": {nearest} in kv_connector_extra_config',
        )
    for name, size in (
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size > 1:
            raise ConfigError(
                f"{name} is {size}: the tokens of a chunk would be spread over workers, which is not supported",
                hint=f"--{name.replace('_', '-')} 1",
            )
    if settings.load_mode in ("sync", "layerwise") and vllm_config.max_concurrent_batches > 1:
        # vLLM takes the tokens of the next step, which ran ahead on what was not loaded, for good ones:
        # `Scheduler.update_from_output` drops those of the step that tells of the failure only.
        raise ConfigError(
            f"load_mode is {settings.load_mode}, and steps run ahead of each other: a load that fails would be noticed "
            "too late",
            hint='"load_mode": "async" or "prefetch", or --no-async-scheduling and one pipeline stage',
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "the scales of the KV cache are calculated at run time, so that its bytes mean something in this engine "
            "only",
            hint="leave out --calculate-kv-scales, or use a model that comes with scales",
        )
    _check_groups(kv_cache_config)


def _check_groups(kv_cache_config: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        raise ConfigError(
            f"this model has {len(groups)} groups of layers with different KV ({kinds}); one is supported",
            hint="--disable-hybrid-kv-cache-manager, which keeps all of a sliding window's KV. Models with state "
            "layers (Mamba) cannot use the pool",
        )
    spec = groups[0].kv_cache_spec
    some = list(getattr(spec, "kv_cache_specs", {0: spec}).values())
    wrong = sorted({type(one).__name__ for one in some if not isinstance(one, FullAttentionSpec)})
    if wrong:
        raise ConfigError(
            f"the KV of this model ({', '.join(wrong)}) does not keep every token, which a prefix needs",
            hint="--disable-hybrid-kv-cache-manager for sliding windows. Others cannot use the pool",
        )


def _name(text: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", str(text))[:_NAME_MAX]


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _weights(vllm_config: Any) -> list[str]:
    # Weights that were made up depend on the seed, and nothing else about such a model tells it.
    loads, model = vllm_config.load_config, vllm_config.model_config
    form = str(getattr(loads.load_format, "value", loads.load_format))
    return [str(getattr(model, "model_weights", "")), f"dummy-{model.seed}" if form == "dummy" else ""]


def _fp8_kind(cache_dtype: str) -> str:
    # Two kinds of 8 bits have one name in the settings.
    if "fp8" not in cache_dtype:
        return ""
    from vllm.platforms import current_platform

    return _dtype(current_platform.fp8_dtype())


def _platform(vllm_config: Any) -> list[str]:
    # An attention backend may have its own order inside a block, which on a CPU follows from its instructions.
    from vllm.platforms import current_platform

    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    parts = [current_platform.device_type, str(getattr(backend, "name", backend))]
    if current_platform.is_cpu():
        import torch

        instructions = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported())
        parts += [str(current_platform.get_cpu_architecture().name), *map(str, instructions)]
    return parts


def _drafts(speculative: Any) -> list[str] | None:
    # The layers of a draft model are in the same cache.
    if speculative is None:
        return None
    return [str(getattr(speculative, name, None)) for name in ("method", "model", "revision", "quantization")]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it. Of what has no such form only the type: its text may have an address in it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return type(value).__name__
