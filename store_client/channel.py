# SPDX-License-Identifier: Apache-2.0
"""A channel to a master, and what its refusals mean here."""

from __future__ import annotations

from typing import Final

import grpc

from moonpool.errors import MoonpoolError
from moonpool.store_client import errors

__all__ = ["error_of", "open_channel"]

_OPTIONS: Final = (
    # gRPC waits up to two minutes before it looks for a master that was away. A restart takes seconds.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    # Channels of one process to one address would share a connection, and with it their troubles.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, secret: bytes | None) -> grpc.Channel:
    """Return a channel to `address`, with proof of the secret on every call. It connects when it is used."""
    return grpc.insecure_channel(address, options=_OPTIONS)


def error_of(error: grpc.RpcError, method: str, address: str) -> MoonpoolError:
    """Return what the master's refusal of a call means."""
    return errors.MasterError(f"the master refused {method}", peer=address, cause=str(error.details()))
