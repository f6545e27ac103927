# SPDX-License-Identifier: Apache-2.0
"""What the tests of the pool share."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from typing import Any

import numpy as np
import pytest

from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import StoreClient
from moonpool.store_client.packing import extents_of


def key(*parts: Any) -> bytes:
    """Return a hash that is different for different parts."""
    return hashlib.sha256(repr(parts).encode()).digest()


def keys(count: int, *parts: Any) -> list[bytes]:
    return [key(*parts, index) for index in range(count)]


def content(hash_: bytes, nbytes: int) -> bytes:
    """Return the bytes that belong to a hash, so that a reader can tell whether they are right."""
    return random.Random(hash_).randbytes(nbytes)


def locate(client: StoreClient, namespace: str, hashes: list[bytes], shard: int = 0) -> Any:
    """Return the extents of chunks, a row for each."""
    request = pb.LocateRequest(namespace=namespace, hashes=b"".join(hashes), shard=shard, lease_ms=1)
    reply = client._core.call("Locate", request, time.monotonic() + 10)
    return extents_of(reply.extents, len(hashes), max(1, reply.replicas))


def spoil(client: StoreClient, extent: np.void, at: int, data: bytes = b"\xff") -> None:
    """Write into an extent, as damage would: `at` is from its beginning, which is the header."""
    target = client._core.segments.target(int(extent["segment"]), client._core.link.cluster, time.monotonic() + 10)
    region = client.engine.allocate(len(data))
    try:
        old = client.engine.allocate(len(data))
        offset = int(extent["offset"]) + at
        client.engine.read(target.peer, old, target.region, 0, offset, len(data)).wait()
        flipped = bytes(a ^ b for a, b in zip(bytes(old), data, strict=True))
        memoryview(region).cast("B")[:] = flipped
        client.engine.write(target.peer, region, target.region, 0, offset, len(data)).wait()
        old.release()
    finally:
        region.release()


def unheard(client: StoreClient, patch: pytest.MonkeyPatch) -> None:
    """Keep from the master what this client finds, so that the pool does not mend what is looked at."""
    patch.setattr(client._core, "report", lambda *_, **__: None)


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Show a figure that nobody asserts."""
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")
