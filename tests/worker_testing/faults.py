# SPDX-License-Identifier: Apache-2.0
"""What breaks while a worker moves something."""

from __future__ import annotations

import signal
import threading

import pytest
from store_testing import locate

from moonpool.cluster import LocalCluster
from moonpool.store_client import StoreClient
from worker_testing.rig import Rig

__all__ = ["breaks", "held_in", "spoil"]

#: Of a stored chunk, before its bytes.
_HEADER_BYTES = 64


def held_in(monkeypatch: pytest.MonkeyPatch, method: str, after: int = 0) -> tuple[threading.Event, threading.Event]:
    """Make calls of the client after the first ones wait before they begin; returns (one has come, they may go on)."""
    came, go_on = threading.Event(), threading.Event()
    original = getattr(StoreClient, method)
    calls = 0

    def held(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls > after:
            came.set()
            assert go_on.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(StoreClient, method, held)
    return came, go_on


def breaks(cluster: LocalCluster, what: str) -> None:
    """Kill or stop the master or the only node: ``kill node``."""
    kind, _, part = what.partition(" ")
    if part == "master":
        cluster.kill_master() if kind == "kill" else cluster.signal_master(0, signal.SIGSTOP)
    else:
        cluster.kill_node(0) if kind == "kill" else cluster.signal_node(0, signal.SIGSTOP)


def spoil(client: StoreClient, rig: Rig, hash_: bytes, at: int = 100) -> None:
    """Change a byte of a chunk where it is."""
    extent = locate(client, rig.saves._pool.namespace, [hash_])[0, 0]
    (segment,) = client.segments()
    peer = client.engine.connect(segment.address)
    scratch = client.allocate(1)
    offset = int(extent["offset"]) + _HEADER_BYTES + at
    remote = peer.regions[segment.region]
    client.engine.read(peer, scratch, remote, 0, offset, 1).wait()
    memoryview(scratch)[0] ^= 1
    client.engine.write(peer, scratch, remote, 0, offset, 1).wait()
