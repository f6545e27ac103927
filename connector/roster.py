# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines see when they start whether those that are there can do anything with each other's KV.

Each says in a roster of the pool what it is, for as long as its session lasts. What a proxy brings together is looked
at request by request all the same (`moonpool.connector.handover`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from moonpool.connector.handover import Identity, difference
from moonpool.errors import ConfigError

__all__ = ["check_others", "entry_of", "is_of_one_role", "roster_of"]

_OTHER: Final = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
_DOES: Final = {"kv_producer": "prefill", "kv_consumer": "decode"}
# Of a namespace: vllm, the tenant, and the name of the model.
_PARTS: Final = 3


def is_of_one_role(role: str) -> bool:
    """Return whether an engine needs one of the other role."""
    return role in _OTHER


def roster_of(identity: Identity) -> str:
    """Return the roster of engines with the same tenant and model, however they are set up."""
    return "/".join(identity.namespace.split("/")[:_PARTS])


def entry_of(identity: Identity, role: str) -> bytes:
    """Return what an engine says of itself."""
    said = {"role": role, "engine": identity.engine_id, "identity": identity.digest, "facts": dict(identity.facts)}
    return json.dumps(said).encode()


def check_others(identity: Identity, role: str, entries: Iterable[bytes]) -> None:
    """Refuse to start where engines of the other role are there, and none of them has KV of the same form.

    Args:
        identity: of this engine.
        role: of this engine.
        entries: of all others. What makes no sense is left out.

    Raises:
        ConfigError: in what they differ.
    """
    others = [said for said in map(_read, entries) if said.get("role") == _OTHER[role]]
    if not others or any(said.get("identity") == identity.digest for said in others):
        return
    some, does = others[0], _DOES[_OTHER[role]]
    raise ConfigError(
        f"no {does} engine of this pool could use the same KV as this one: {difference(some.get('facts'), identity)}",
        cause=f"{len(others)} of them have another form of KV, {str(some.get('engine'))[:64]!r} is the first",
        hint="engines that are set up alike, another tenant for each set of them, or "
        '"handover_check": 0 while they are changed one by one. One that was killed counts until its session is over',
    )


def _read(entry: bytes) -> dict[str, Any]:
    try:
        said = json.loads(entry)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
