# SPDX-License-Identifier: Apache-2.0
"""Hundreds of sessions in one process, to be killed: ``python -m master_testing.crowd ADDRESS COUNT``.

Each has put a chunk and pins it, and is writing another one. It says so on its standard output with a line of the
chunks' hashes, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

from moonpool.proto import pool_pb2 as pb
from moonpool.proto import pool_pb2_grpc
from moonpool.proto.auth import aio_channel

# Sessions that share a connection: a thousand connections need more descriptors than every machine gives.
_SHARE = 25
_SECONDS = 60.0
_INTERVAL = 2.0


class _Session:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._id, self._ready = os.urandom(16), asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def _beats(self) -> AsyncIterator[pb.HeartbeatRequest]:
        yield pb.HeartbeatRequest(hello=pb.Hello(session=self._id, incarnation=os.urandom(16)))
        while True:
            await asyncio.sleep(_INTERVAL)
            yield pb.HeartbeatRequest()

    async def _beat(self) -> None:
        async for _ in self._pool.Heartbeat(self._beats()):
            self._ready.set()

    async def _start(self, chunk: bytes) -> bytes:
        given = await self._pool.PutStart(
            pb.PutStartRequest(
                session=self._id, namespace="ns", hashes=chunk, lengths=struct.pack("<Q", 1000), request=os.urandom(16)
            ),
            timeout=_SECONDS,
        )
        assert given.statuses == bytes(1), given.statuses
        generation: bytes = given.extents[:8]
        return generation

    async def begin(self) -> bytes:
        """Be a client in the middle of its work. Returns the hash of its chunk."""
        self._beating = asyncio.ensure_future(self._beat())
        await asyncio.wait_for(self._ready.wait(), _SECONDS)
        chunk = os.urandom(32)
        generation = await self._start(chunk)
        commit = pb.PutCommitRequest(session=self._id, namespace="ns", hashes=chunk, generations=generation)
        assert (await self._pool.PutCommit(commit, timeout=_SECONDS)).statuses == bytes(1)
        pin = pb.PinRequest(session=self._id, namespace="ns", hashes=chunk, request=os.urandom(16))
        assert (await self._pool.Pin(pin, timeout=_SECONDS)).pin
        await self._start(os.urandom(32))
        return chunk


async def _crowd(address: str, count: int) -> None:
    channels = [aio_channel(address, None) for _ in range(-(-count // _SHARE))]
    pools: list[Any] = [pool_pb2_grpc.PoolStub(channel) for channel in channels]
    sessions = [_Session(pools[number // _SHARE]) for number in range(count)]
    chunks = await asyncio.gather(*(session.begin() for session in sessions))
    sys.stdout.write(b"".join(chunks).hex() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_crowd(sys.argv[1], int(sys.argv[2])))
