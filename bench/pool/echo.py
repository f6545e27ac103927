# SPDX-License-Identifier: Apache-2.0
"""What a gRPC server does that does nothing: ``python -m moonpool.bench.pool.echo TIED READY``.

The same kind of server as the master's (grpc.aio, one event loop, messages as bytes). It answers each call with the
bytes that it was told once by a call of ``Set``: the answer of the master to the same request.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, Final

import grpc
import grpc.aio

__all__ = ["SERVICE", "main", "setting"]

SERVICE: Final = "moonpool.bench.Echo"
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def setting(name: str, reply: bytes) -> bytes:
    """Return the request of ``Set`` by which calls of `name` are answered with `reply`."""
    return bytes([len(name)]) + name.encode("ascii") + reply


class _Echo(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {f"/{SERVICE}/Set": grpc.unary_unary_rpc_method_handler(self._set, None, None)}

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)

    async def _set(self, data: bytes, _: Any) -> bytes:
        end = 1 + data[0]
        reply = data[end:]

        async def call(_: bytes, __: Any) -> bytes:
            return reply

        method = f"/{SERVICE}/{data[1:end].decode('ascii')}"
        self._handlers[method] = grpc.unary_unary_rpc_method_handler(call, None, None)
        return b""


async def _serve(tied: int, ready: int) -> None:
    end = asyncio.Event()
    # The pipe never has bytes: it is readable when the benchmark is gone.
    asyncio.get_running_loop().add_reader(tied, end.set)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with os.fdopen(ready, "w", encoding="ascii") as file:
        file.write(f"127.0.0.1:{port}\n")
    await end.wait()
    asyncio.get_running_loop().remove_reader(tied)
    await server.stop(None)


def main() -> None:
    """Serve until the benchmark is gone."""
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
