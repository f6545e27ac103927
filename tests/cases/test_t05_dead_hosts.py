# SPDX-License-Identifier: Apache-2.0
"""T5.

What people met: the submitting thread blocked in `connect()` to a dead host and delayed all other peers.

What must happen instead: connecting is asynchronous, has its own deadline, delays nobody else.
"""

from __future__ import annotations

import threading

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.networks import mute_host, unaccepting_host
from engine_testing.patterns import fill, pattern

from moonpool.transfer_engine import ClosedError, ConnectError, DeadlineError, MoonpoolError, PeerState
from moonpool.transfer_engine.testing import FaultProxy


def test_connecting_to_a_dead_host_delays_nobody(open_engine: OpenEngine) -> None:
    server = open_engine("server", transports="tcp")
    # A single I/O thread: whatever blocked it would stop everything.
    client = open_engine("client", transports="tcp", listen=None, io_threads=1)
    fill(server.allocate(1 << 16, name="kv"))
    outcomes: list[MoonpoolError] = []

    def connect_in_vain(address: str) -> None:
        try:
            client.connect(address, timeout=120.0)
        except MoonpoolError as error:
            outcomes.append(error)

    with unaccepting_host() as dead, mute_host() as mute:
        threads = [threading.Thread(target=connect_in_vain, args=(address,)) for address in (dead, dead, mute)]
        for thread in threads:
            thread.start()
        local = client.allocate(1 << 16)
        for _ in range(20):
            with client.connect(server.address or "") as peer:
                client.read(peer, local, peer.regions["kv"]).wait()
        assert bytes(local) == pattern(1 << 16)
        # All of that happened while the three were still trying.
        assert not outcomes
        client.close()
        for thread in threads:
            thread.join()
    assert len(outcomes) == 3
    assert all(isinstance(error, ClosedError) for error in outcomes)


def test_submitting_to_a_peer_whose_host_died_does_not_block(open_engine: OpenEngine) -> None:
    """The transfer waits for the connection; the thread that submitted it does not."""
    server, other = open_engine("server", transports="tcp"), open_engine("other", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None, io_threads=1)
    server.allocate(4096, name="kv")
    other.allocate(4096, name="kv")
    local = client.allocate(4096)
    with FaultProxy(server.address or "") as network:
        gone, there = client.connect(network.address), client.connect(other.address or "")
        remote = gone.regions["kv"]
        network.stall()
        network.cut()
        assert eventually(lambda: gone.state is not PeerState.READY)
        # From now on the relay accepts connections and answers nothing.
        waiting = [client.read(gone, local, remote, deadline=2.0) for _ in range(20)]
        for _ in range(100):
            client.read(there, local, there.regions["kv"]).wait()
        for transfer in waiting:
            with pytest.raises((DeadlineError, ConnectError, ConnectionError)):
                transfer.wait()
        client.close()


def test_the_connect_timeout_is_its_own(open_engine: OpenEngine) -> None:
    client = open_engine(listen=None, transports="tcp", connect_timeout=0.1, deadline=1000.0)
    with unaccepting_host() as dead, pytest.raises(ConnectError):
        client.connect(dead)
