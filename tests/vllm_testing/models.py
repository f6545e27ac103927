# SPDX-License-Identifier: Apache-2.0
"""Models so small that an engine with one starts in a second, whose next token hangs on every token before.

vLLM's own dummy weights are so small that attention hardly matters: a model of them goes on with the right tokens
whatever its cache holds. These are of a size that spreads a wrong byte at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["VOCABULARY", "adapter", "llama", "mla"]

VOCABULARY = 512
_HIDDEN = 128
_INNER = 256
_HEADS = 4


def llama(folder: Path, *, layers: int = 4, seed: int = 0, kv_heads: int = 2) -> Path:
    """Write a model with grouped-query attention and return its folder."""
    head = 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": head,
        "num_key_value_heads": kv_heads,
    }
    attention = {
        "q_proj": (_HEADS * head, _HIDDEN),
        "k_proj": (kv_heads * head, _HIDDEN),
        "v_proj": (kv_heads * head, _HIDDEN),
        "o_proj": (_HIDDEN, _HEADS * head),
    }
    return _write(folder, config, attention, {}, layers, seed)


def mla(folder: Path, *, layers: int = 3, seed: int = 0) -> Path:
    """Write a model with multi-head latent attention, of which every rank has the same cache, and return its folder."""
    nope, rope, value, rank = 64, 64, 64, 512
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": _HEADS,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        # Every layer is dense.
        "first_k_dense_replace": layers,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
    }
    attention = {
        "q_proj": (_HEADS * (nope + rope), _HIDDEN),
        "kv_a_proj_with_mqa": (rank + rope, _HIDDEN),
        "kv_b_proj": (_HEADS * (nope + value), rank),
        "o_proj": (_HIDDEN, _HEADS * value),
    }
    return _write(folder, config, attention, {"kv_a_layernorm": rank}, layers, seed)


def adapter(folder: Path, *, layers: int = 4, rank: int = 8, seed: int = 0) -> Path:
    """Write a LoRA adapter for keys and values of a `llama` and return its folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    chance = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for name in config["target_modules"]:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            for part, shape in (("lora_A", (rank, _HIDDEN)), ("lora_B", (2 * 64, rank))):
                tensors[f"{prefix}{part}.weight"] = chance.normal(0, 0.5, shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _write(
    folder: Path,
    config: dict[str, Any],
    attention: dict[str, tuple[int, int]],
    norms: dict[str, int],
    layers: int,
    seed: int,
) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps({**common, **config}), encoding="utf-8")
    chance = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        # Keeps the size of what goes through it, and sharpens attention a little.
        return chance.normal(0, 1.5 / np.sqrt(columns), (rows, columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": chance.normal(0, 1, (VOCABULARY, _HIDDEN)).astype(np.float32),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in attention.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(*shape)
        for name, size in norms.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = np.ones(size, np.float32)
        for name, shape in (
            ("gate_proj", (_INNER, _HIDDEN)),
            ("up_proj", (_INNER, _HIDDEN)),
            ("down_proj", (_HIDDEN, _INNER)),
        ):
            tensors[f"{prefix}mlp.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(_HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
