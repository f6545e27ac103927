# SPDX-License-Identifier: Apache-2.0
"""Pools side by side: each with server processes of its own, and its client in a process of its own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moonpool.bench.pool.peers.base import PoolBackend

__all__ = ["BACKENDS", "backend_of"]

#: What can be compared, and where it is.
BACKENDS: Final[dict[str, str]] = {
    "moonpool": "moonpool.bench.pool.peers.moonpool_pool:MoonpoolPool",
    "mooncake": "moonpool.bench.pool.peers.mooncake_pool:MooncakePool",
    "mooncake-dummy": "moonpool.bench.pool.peers.mooncake_pool:MooncakeDummyPool",
}


def backend_of(name: str) -> type[PoolBackend]:
    """Return what is measured."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[PoolBackend] = getattr(importlib.import_module(module), attribute)
    return backend
