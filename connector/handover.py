# SPDX-License-Identifier: Apache-2.0
"""Hand-overs: one engine computes a prompt (prefill), another one goes on with it (decode).

A proxy asks the first for one token with ``do_remote_decode``, and gives what comes back as `kv_transfer_params` to the
second. The names are those of the connectors in vLLM's tree, so that proxies made for these work; what is only read
here begins with ``moonpool_``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from moonpool.errors import MoonpoolError

__all__ = ["HandOver", "HandOverRefusedError", "Identity", "is_asked_for", "offered", "taken"]

_WANTED: Final = "do_remote_decode"
_GIVEN: Final = "do_remote_prefill"
_TOKENS: Final = "remote_num_tokens"
_ENGINE: Final = "remote_engine_id"
_IDENTITY: Final = "moonpool_identity"
_FACTS: Final = "moonpool_facts"


class HandOverRefusedError(MoonpoolError, ValueError):
    """What another engine has computed cannot be used by this one."""

    default_code = "HAND_OVER_REFUSED"


@dataclass(frozen=True, slots=True)
class Identity:
    """What two engines must have in common.

    Attributes:
        engine_id: vLLM's.
        namespace: of the pool.
        facts: what of the namespace may be told to whoever sends requests, to say in what two engines differ.
    """

    engine_id: str
    namespace: str
    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """What stands for all of it: the last part of the namespace, which names the model, is one."""
        return self.namespace.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HandOver:
    """What another engine has computed of a request.

    Attributes:
        blocks: of its prompt, from the first on, that are in the pool or on their way there.
        since: when it was said, of `time.monotonic`.
        until: how long what is on its way is waited for.
    """

    blocks: int
    since: float
    until: float


def is_asked_for(request: Any) -> bool:
    """Return whether another engine will go on with a request."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and bool(params.get(_WANTED))


def offered(request: Any, identity: Identity, tokens: int) -> dict[str, Any]:
    """Return what the engine is told that goes on with a request, of which so many tokens come over."""
    return {
        _GIVEN: True,
        _WANTED: False,
        _ENGINE: identity.engine_id,
        "remote_request_id": request.request_id,
        "remote_block_ids": None,
        "tp_size": identity.facts.get("tp"),
        _TOKENS: tokens,
        _IDENTITY: identity.digest,
        _FACTS: dict(identity.facts),
    }


def taken(request: Any, identity: Identity, block_tokens: int, wait: float) -> HandOver | None:
    """Return what another engine has computed of a request; None: nobody says so.

    Args:
        request: vLLM's.
        identity: of this engine.
        block_tokens: tokens of one block.
        wait: seconds for which what has not come yet is waited for.

    Raises:
        HandOverRefusedError: this engine cannot use it, or it is none of this connector. Whoever sends requests has
            written it, so nothing in it is believed that could hurt.
    """
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or not params.get(_GIVEN):
        return None
    digest, facts, tokens = params.get(_IDENTITY), params.get(_FACTS), params.get(_TOKENS)
    if not isinstance(digest, str) or type(tokens) is not int or tokens < 0:
        raise HandOverRefusedError(
            "kv_transfer_params are not those of this connector",
            hint="the kv_transfer_params of the answer of a prefill engine with MoonpoolConnector, as they are",
        )
    if digest != identity.digest:
        engine = str(params.get(_ENGINE))[:64]
        raise HandOverRefusedError(
            f"the prefill engine {engine!r} has KV of another form: {_difference(facts, identity)}",
            hint="two engines that are set up alike",
        )
    blocks = min(min(tokens, request.num_prompt_tokens) // block_tokens, len(request.block_hashes))
    now = time.monotonic()
    return HandOver(blocks, now, now + wait) if blocks else None


def _difference(facts: Any, identity: Identity) -> str:
    there = facts if isinstance(facts, Mapping) else {}
    different = [
        f"{name} is {str(there[name])[:64]} there and {its} here"
        for name, its in identity.facts.items()
        if name in there and there[name] != its
    ]
    return ", ".join(different) or "another model, revision or tenant, or another configuration of it"
