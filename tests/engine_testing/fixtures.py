# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine's tests; the conftest of each suite imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine_testing.leaks import nothing_left_behind
from moonpool.transfer_engine import Peer, Region, RemoteRegion, TransferEngine

OpenEngine = Callable[..., TransferEngine]

#: A virtual machine may be paused for a minute at any moment while its clock goes on, and then every deadline of the
#: usual length has passed. Tests that are about a deadline name their own.
PATIENT = {"deadline": 900.0, "progress_timeout": 300.0, "connect_timeout": 300.0}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, sockets or eventfds in this process."""
    with nothing_left_behind():
        yield


@pytest.fixture
def open_engine(no_leaks: None) -> Iterator[OpenEngine]:
    """Open engines that are closed after the test."""
    engines: list[TransferEngine] = []

    def open_one(name: str = "engine", **options: Any) -> TransferEngine:
        engine = TransferEngine(name, **{**PATIENT, **options})
        engines.append(engine)
        return engine

    yield open_one
    for engine in reversed(engines):
        engine.close()


@dataclass
class Pair:
    """Two engines of this process, `client` connected to `server`, with a region on each side."""

    client: TransferEngine
    server: TransferEngine
    peer: Peer
    local: Region
    region: Region
    remote: RemoteRegion


@pytest.fixture(params=["tcp", "shm", "local"])
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport that works inside one process."""
    transport: str = request.param
    return transport


@pytest.fixture
def open_pair(open_engine: OpenEngine) -> Callable[..., Pair]:
    """Open pairs of engines over a given transport."""

    def open_one(transport: str, nbytes: int = 1 << 16, **options: Any) -> Pair:
        server = open_engine("server", transports=transport, **options)
        client = open_engine("client", transports=transport, listen=None, **options)
        region = server.allocate(nbytes, name="kv")
        assert server.address is not None
        peer = client.connect(server.address)
        return Pair(client, server, peer, client.allocate(nbytes), region, peer.regions["kv"])

    return open_one


@pytest.fixture
def pair(open_pair: Callable[..., Pair], transport: str) -> Pair:
    """A pair over each transport in turn."""
    return open_pair(transport)
