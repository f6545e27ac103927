# SPDX-License-Identifier: Apache-2.0
"""T3.

What people met: a new TCP connection per transfer used up the ports under load.

What must happen instead: persistent lanes; the number of sockets stays bounded whatever the number of transfers.
"""

from __future__ import annotations

import threading

from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually, sockets
from engine_testing.processes import Target

from moonpool.transfer_engine.testing import FaultProxy

LANES = 3


def test_thousands_of_transfers_use_the_same_connections(open_engine: OpenEngine) -> None:
    client = open_engine(listen=None, transports="tcp", lanes=LANES)
    with Target({"kv": 1 << 20}, transports="tcp") as target, FaultProxy(target.address) as network:
        peer = client.connect(network.address)
        remote = peer.regions["kv"]
        most = 0

        def work() -> None:
            nonlocal most
            local = client.allocate(1 << 20)
            for step in range(300):
                running = [client.read(peer, local, remote, 0, 0, 1 << (step % 21)) for _ in range(4)]
                most = max(most, client.stats()["lanes"])
                for transfer in running:
                    transfer.wait()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One control connection and the lanes, ever: a relay sees every connection that was made.
        assert 2 <= len(network.connection_bytes) <= 1 + LANES
        assert most <= LANES
        assert target.ask("stats")["serving"]["lanes"] <= LANES
        peer.close()


def test_handles_on_one_peer_do_not_multiply_idle_sockets(open_engine: OpenEngine) -> None:
    """A peer that is dropped gives its connections back."""
    server, client = open_engine(transports="tcp"), open_engine(listen=None, transports="tcp", lanes=LANES)
    server.allocate(4096, name="kv")
    local = client.allocate(4096)
    before = sockets()
    for _ in range(50):
        with client.connect(server.address or "") as peer:
            client.read(peer, local, peer.regions["kv"]).wait()
        # Each side holds its end of the control connection and of the lanes, until it has seen the other's close.
        assert eventually(lambda: sockets() - before <= 4 * (1 + LANES))
