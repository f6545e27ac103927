# SPDX-License-Identifier: Apache-2.0
"""What differs between the versions of vLLM, in one place. Everything else is written for the newest.

Read in the sources of 0.29.0 to 0.33.0. Older ones start loads and hash the first block in another way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final

from moonpool.errors import ConfigError

__all__ = [
    "block_ids_of",
    "check_version",
    "computed_tokens",
    "configured_outside",
    "has_ended_well",
    "has_forward",
    "layout_of",
    "tp_replicas",
]

_log = logging.getLogger(__name__)

_OLDEST: Final = (0, 29)
_NEWEST: Final = (0, 33)


def check_version() -> None:
    """Look at the version of vLLM that is installed.

    Raises:
        ConfigError: it is too old for what the connector relies on.
    """
    text = _version()
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:  # built from a checkout, without a version
        return
    version = int(found[1]), int(found[2])
    if version < _OLDEST and version != (0, 0):
        raise ConfigError(
            f"this is vLLM {text}, and the connector needs {_OLDEST[0]}.{_OLDEST[1]} or newer",
            hint="pip install --upgrade vllm",
        )
    if version > _NEWEST:
        _log.warning("moonpool: this is vLLM %s; the connector was tested up to %d.%d", text, *_NEWEST)


def computed_tokens(request: Any) -> int:
    """Return for how many tokens of a request the KV is computed, by steps that have ended.

    What the scheduler counts has those of steps that run too, and draft tokens that may yet be rejected.
    """
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    return computed


def block_ids_of(scheduler_output: Any, request_id: str) -> list[int] | None:
    """Return the blocks of a request that is scheduled in this step, of its only group; None: they are not told."""
    state = scheduler_output.kv_connector_block_state
    # Until 0.29 a table, and only of those that got blocks in this step.
    ask = state.get_block_ids if hasattr(state, "get_block_ids") else state.block_ids.get
    groups = ask(request_id)
    return None if groups is None else groups[0]


def has_ended_well(request: Any) -> bool:
    """Return whether a request has ended because it had all its tokens, not by an abort or an error."""
    return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def has_forward(forward_context: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether the step that loads begin with has a forward pass.

    Args:
        forward_context: as `start_load_kv` gets it.
        arguments: its others. The newer model runner gives some for steps that compute, and no metadata in the context.
    """
    return bool(arguments) or getattr(forward_context, "attn_metadata", None) is not None


def layout_of(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the name of the layout of the cache: the engine resolves one for all workers."""
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    return str(layout) if layout else "default"


def tp_replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many workers one after the other have the same KV."""
    known = getattr(kv_cache_config, "kv_tp_replicas", None)
    if known is not None:
        return int(known)
    tp, model = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    return int(max(1, tp // heads))


def configured_outside(vllm_config: Any) -> Any:
    """Return the transfer config of the connector that this one is in (MultiConnector), where that can be seen.

    vLLM makes a config of its own for each connector inside, and only tells its workers which one it goes by.
    """
    from vllm.config import vllm as module

    current = module.get_current_vllm_config_or_none()
    if current is None or current.kv_transfer_config is vllm_config.kv_transfer_config:
        return None
    return current.kv_transfer_config


def _version() -> str:
    import vllm

    return str(vllm.__version__)
