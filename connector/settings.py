# SPDX-License-Identifier: Apache-2.0
"""What can be set about a connector."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from moonpool.settings import load, setting

__all__ = ["ConnectorSettings"]

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class ConnectorSettings:
    """Every setting of a connector. Sizes are bytes, durations are seconds.

    Each value is the key in ``kv_connector_extra_config``, else the environment variable
    ``MOONPOOL_CONNECTOR_<FIELD>``, else the key in the table ``[connector]`` of the TOML file that ``MOONPOOL_CONFIG``
    names, else the default. Where the pool is (`master`, `secret`, TLS) are settings of the store client:
    ``"store_client": {"master": ...}`` in ``kv_connector_extra_config``, or its own variables and table.
    """

    tenant: str = setting("default", "Keeps the KV of tenants apart who must not share prefixes. Part of every key.")
    revision: str | None = setting(
        None,
        "Which weights the model has, part of every key. None: the revision vLLM was given. Set it when the files of a "
        "model change under the same name.",
    )
    chunk_tokens: int = setting(256, "Tokens of one chunk: a multiple of the block size.", minimum=1, maximum=1 << 16)
    load_mode: str = setting(
        "async",
        "How a prefix that the pool has comes into the cache. sync: before the step that computes the rest. "
        "layerwise: during that step, each layer while those before it compute. async: in the background, while other "
        "requests run. prefetch: into host memory in the background, and into the cache once all of it is there: a "
        "request holds no blocks of the cache meanwhile. off: never.",
        choices=("sync", "layerwise", "async", "prefetch", "off"),
    )
    save_mode: str = setting(
        "all",
        "What is put into the pool: all (prompts and generated tokens), prompt, or off.",
        choices=("all", "prompt", "off"),
    )
    load_choice: str = setting(
        "always",
        "What of the pool's is loaded. always: everything. adaptive: what is quicker to load than to compute, as both "
        "were measured, and less while loads are late or fail.",
        choices=("always", "adaptive"),
    )
    load_probe: float = setting(
        5.0,
        "How often a load is tried that would not be (`load_choice` adaptive), since it may be quicker by now.",
        unit="seconds",
        minimum=0.01,
        maximum=_HOUR,
    )
    load_tokens_min: int = setting(
        0, "A load that would save fewer tokens than this is not begun.", minimum=0, maximum=1 << 30
    )
    lookup_timeout: float = setting(
        0.1,
        "How long a request waits for the master to say what the pool has. After that it is computed.",
        unit="seconds",
        minimum=0.0,
        maximum=60.0,
    )
    lookups_max: int = setting(
        4096, "Most requests whose look-up is under way or waits. Others are computed.", minimum=1, maximum=1 << 20
    )
    handover_wait: float = setting(
        2.0,
        "How long a request that another engine hands over waits for what that one is still saving. What has not come "
        "by then is computed.",
        unit="seconds",
        minimum=0.0,
        maximum=_HOUR,
    )
    handover_check: float = setting(
        2.0,
        "How long an engine of one role (kv_producer or kv_consumer) waits for the pool when it starts, to see whether "
        "the engines of the other role that are there have KV of the same form. Where none has, it does not start. 0: "
        "what another engine hands over is looked at request by request.",
        unit="seconds",
        minimum=0.0,
        maximum=60.0,
    )
    peer_listen: str | None = setting(
        None,
        "Address on which each worker accepts decode engines, such as 0.0.0.0:0, so that they read the KV of what is "
        "handed over straight from its cache. Rank r listens on the port plus r. Beyond loopback the pool needs a "
        "secret. None: what is handed over goes through the pool.",
    )
    peer_host: str | None = setting(
        None,
        "Name or address of this host that decode engines connect to. None: that of `peer_listen`, or the host name.",
    )
    peer_reads: bool = setting(
        True, "Whether the KV of what is handed over is read straight from the engine that has it, where that can be."
    )
    peer_lease: float = setting(
        5.0,
        "How long blocks are kept for a decode engine that says nothing. It says that it needs them three times as "
        "often.",
        unit="seconds",
        minimum=0.2,
        maximum=_HOUR,
    )
    peer_blocks_max: float = setting(
        0.5,
        "Share of the blocks of the cache that may be kept for decode engines. What is beyond that goes through the "
        "pool.",
        minimum=0.0,
        maximum=1.0,
    )
    load_timeout: float = setting(
        10.0,
        "Longest time of one load. What has not come by then is computed.",
        unit="seconds",
        minimum=0.01,
        maximum=_HOUR,
    )
    save_timeout: float = setting(15.0, "Longest time of one save.", unit="seconds", minimum=0.01, maximum=_HOUR)
    shutdown_wait: float = setting(
        2.0,
        "How long an engine that ends waits for saves under way.",
        unit="seconds",
        minimum=0.0,
        maximum=60.0,
    )
    saving_blocks_max: float = setting(
        0.25,
        "Share of the blocks of the cache that saves may keep from being used again. What is beyond that is not saved.",
        minimum=0.0,
        maximum=1.0,
    )
    saves_max: int = setting(
        1024, "Most saves that wait. What is beyond that is not saved.", minimum=1, maximum=1 << 20
    )
    known_max: int = setting(
        131_072,
        "Most chunks that are remembered to be in the pool, since this engine has saved them, and not saved again.",
        minimum=1,
        maximum=1 << 24,
    )
    staging_bytes: int = setting(
        256 << 20,
        "Most registered memory of each worker for chunks of which a request needs only a part: one for each of "
        "`load_threads`. All others come straight into the cache.",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 40,
    )
    prefetch_bytes: int = setting(
        1 << 30,
        "Most registered host memory of each worker for chunks that were fetched (`load_mode` prefetch). Chunks that "
        "no request waits for stay until others need their room.",
        unit="bytes",
        minimum=1 << 16,
        maximum=1 << 44,
    )
    load_threads: int = setting(2, "Loads of one worker at the same time.", minimum=1, maximum=64)
    save_threads: int = setting(1, "Saves of one worker at the same time.", minimum=1, maximum=64)
    retry: float = setting(
        1.0,
        "While the pool cannot be reached, how often it is tried. Requests are computed meanwhile.",
        unit="seconds",
        minimum=0.01,
        maximum=60.0,
    )

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> ConnectorSettings:
        """Read the settings.

        Raises:
            ConfigError: an unknown name, a wrong type or unit, or an impossible value.
        """
        return load(cls, "connector", arguments, file=file, environ=environ)
