# SPDX-License-Identifier: Apache-2.0
"""Hosts that do not answer. A network that misbehaves is `moonpool.transfer_engine.testing.FaultProxy`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


@contextmanager
def unaccepting_host() -> Iterator[str]:
    """An address where the kernel completes no further connection: a full backlog that nobody accepts from."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            yield _address(listener)
        finally:
            for filler in fillers:
                filler.close()


@contextmanager
def mute_host() -> Iterator[str]:
    """An address that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield _address(listener)
