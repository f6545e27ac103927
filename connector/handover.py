# SPDX-License-Identifier: Apache-2.0
"""Hand-overs: one engine computes a prompt (prefill), another one goes on with it (decode).

A proxy asks the first for one token with ``do_remote_decode``, and gives what comes back as `kv_transfer_params` to the
second. The names are those of the connectors in vLLM's tree, so that proxies made for these work; what is only read
here begins with ``moonpool_``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from moonpool.connector.jobs import TOKEN_BYTES, Lent
from moonpool.connector.lease_plan import digest_of
from moonpool.errors import MoonpoolError

__all__ = ["HandOver", "HandOverRefusedError", "Identity", "difference", "is_asked_for", "offered", "taken"]

_WANTED: Final = "do_remote_decode"
_GIVEN: Final = "do_remote_prefill"
_TOKENS: Final = "remote_num_tokens"
_ENGINE: Final = "remote_engine_id"
_IDENTITY: Final = "moonpool_identity"
_FACTS: Final = "moonpool_facts"
_BLOCKS: Final = "remote_block_ids"
_LEASE: Final = "moonpool_lease"
# In seconds. What is renewed more often would be renewed all the time.
_LEASE_MIN: Final = 0.2


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
        lent: the same blocks where they lie there, for as long as that engine keeps them; None: it does not.
    """

    blocks: int
    since: float
    until: float
    lent: Lent | None = None


def is_asked_for(request: Any) -> bool:
    """Return whether another engine will go on with a request."""
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and bool(params.get(_WANTED))


def offered(request: Any, identity: Identity, tokens: int, lent: Lent | None) -> dict[str, Any]:
    """Return what the engine is told that goes on with a request, of which so many tokens come over."""
    lease = {}
    if lent is not None:
        lease[_LEASE] = {
            "peers": [list(peer) for peer in lent.peers],
            "slot": lent.slot,
            "token": lent.token.hex(),
            "seconds": lent.seconds,
        }
    return {
        _GIVEN: True,
        _WANTED: False,
        _ENGINE: identity.engine_id,
        "remote_request_id": request.request_id,
        _BLOCKS: None if lent is None else [lent.block_ids],
        "tp_size": identity.facts.get("tp"),
        _TOKENS: tokens,
        _IDENTITY: identity.digest,
        _FACTS: dict(identity.facts),
        **lease,
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
            f"the prefill engine {engine!r} has KV of another form: {difference(facts, identity)}",
            hint="two engines that are set up alike",
        )
    blocks = min(min(tokens, request.num_prompt_tokens) // block_tokens, len(request.block_hashes))
    now = time.monotonic()
    if not blocks:
        return None
    # What the other engine lends is all of the prompt, or it is not this one.
    whole = blocks == request.num_prompt_tokens // block_tokens
    return HandOver(blocks, now, now + wait, _lent(params, request.block_hashes[blocks - 1], blocks) if whole else None)


def _lent(params: Mapping[str, Any], key: bytes, blocks: int) -> Lent | None:
    """Return so many blocks that are lent, of which the last has to have this key; None: none are."""
    try:
        lease, (block_ids,) = params[_LEASE], params[_BLOCKS]
        peers = tuple((str(address), str(incarnation)) for address, incarnation in lease["peers"])
        slot, token, seconds = int(lease["slot"]), bytes.fromhex(lease["token"]), float(lease["seconds"])
        block_ids = [int(one) for one in block_ids]
        digest = digest_of(key, block_ids)
    except (KeyError, TypeError, ValueError, OverflowError):
        # The proxy did not pass it on, or somebody made it up. The pool does as well.
        return None
    good = len(block_ids) == blocks and len(token) == TOKEN_BYTES and slot >= 0 and math.isfinite(seconds)
    return Lent(peers, slot, token, digest, block_ids, max(seconds, _LEASE_MIN)) if good else None


def difference(facts: Any, identity: Identity) -> str:
    """Return in what another engine, which has said these facts, and this one differ."""
    there = facts if isinstance(facts, Mapping) else {}
    different = [
        f"{name} is {str(there[name])[:64]} there and {its} here"
        for name, its in identity.facts.items()
        if name in there and there[name] != its
    ]
    return ", ".join(different) or "another model, revision or tenant, or another configuration of it"
