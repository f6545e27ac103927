# SPDX-License-Identifier: Apache-2.0
"""Parts of transactions, and what is found in their answers."""

from __future__ import annotations

from typing import Any

from moonpool.master.errors import StoreUnavailableError
from moonpool.master.store.etcd.calls import RefusedError

__all__ = ["compare", "first", "get", "unavailable"]


def unavailable(what: str, error: RefusedError) -> StoreUnavailableError:
    """Return the error for what etcd has refused."""
    hint = "see etcd_user and what it may do" if error.stale_token or "permission" in error.text else "see etcd"
    return StoreUnavailableError(what, cause=str(error), retryable=error.full or error.busy, hint=hint)


def compare(rpc: Any, key: bytes, *, mod: int | None = None, create: int | None = None) -> Any:
    """Return the condition that a key was written last, or made, at a revision; 0: that it is not there."""
    if mod is not None:
        return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=mod)
    return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=create)


def get(rpc: Any, key: bytes) -> Any:
    """Return the operation that reads a key."""
    request = rpc.RequestOp()
    request.request_range.key = key
    return request


def first(response: Any) -> Any:
    """Return the key that was found, or None."""
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None
