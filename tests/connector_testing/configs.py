# SPDX-License-Identifier: Apache-2.0
"""Configs of vLLM for a model that is nothing but its config."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
}
BLOCK = 16


@functools.cache
def model_folder(config: str) -> str:
    """Return a folder with this config, the same for as long as this process runs."""
    folder = Path(tempfile.mkdtemp(prefix="moonpool-model-"))
    (folder / "config.json").write_text(config)
    return str(folder)


def vllm_config(
    extra: dict[str, Any] | None = None,
    *,
    model: dict[str, Any] | None = None,
    block_tokens: int = BLOCK,
    blocks: int = 64,
    step_tokens: int = 256,
    requests: int = 16,
    role: str = "kv_both",
    connector: str = "MoonpoolConnector",
    transfer: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a config of an engine with the connector.

    Args:
        extra: `kv_connector_extra_config`.
        model: `config.json`; None: a small Llama.
        block_tokens: tokens of one block.
        blocks: of the cache.
        step_tokens: most tokens of one step.
        requests: most that run.
        role: of the connector.
        connector: its name.
        transfer: more of the transfer config.
        options: other configs of `VllmConfig`, and fields of `ModelConfig` and `CacheConfig`.
    """
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    path = model_folder(json.dumps(model or LLAMA))
    model_options = {name: options.pop(name) for name in ("revision", "dtype", "seed") if name in options}
    cache_options = {name: options.pop(name) for name in ("cache_dtype", "prefix_caching_hash_algo") if name in options}
    model_config = ModelConfig(
        model=path, skip_tokenizer_init=True, max_model_len=2048, **{"dtype": "float32", "seed": 0, **model_options}
    )
    scheduler = SchedulerConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=step_tokens,
        max_model_len=2048,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        watermark=0.0,
    )
    cache = CacheConfig(block_size=block_tokens, enable_prefix_caching=True, **cache_options)
    cache.num_gpu_blocks = blocks
    events = options.pop("kv_events", False)
    parallel = options.pop("parallel", None)
    drafts, ahead = options.pop("drafts", 0), options.pop("ahead", False)
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        scheduler_config=scheduler,
        parallel_config=ParallelConfig(**(parallel or {})),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path="moonpool.connector" if connector == "MoonpoolConnector" else None,
            kv_role=role,
            kv_connector_extra_config=dict(extra or {}),
            **(transfer or {}),
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        **options,
    )
    if drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=2,
            target_model_config=model_config,
            target_parallel_config=config.parallel_config,
        )
    # A platform may have other wishes.
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.block_size = block_tokens
    config.cache_config.num_gpu_blocks = blocks
    return config


def cache_config(config: Any, groups: int = 1, **fields: Any) -> Any:
    """Return a cache config of one group, or of several with different windows."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    common: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float32,
    }
    specs = [FullAttentionSpec(**common)]
    specs += [SlidingWindowSpec(**common, sliding_window=64 * (index + 1)) for index in range(groups - 1)]
    return KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)],
        **fields,
    )
