# SPDX-License-Identifier: Apache-2.0
"""Queue pairs: made when there is work for them, given up when others need them, and on which rail of the peer."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from moonpool.transfer_engine import Peer, TransferEngine
from rdma_lab.inside.links import wait_until
from rdma_lab.inside.pair import MIB, WAIT, Pair
from rdma_lab.inside.stranger import StrangeServer

PEERS, BOUND = 12, 4


def queue_pairs(engine: TransferEngine) -> int:
    return sum(rail["queue_pairs"] for rail in engine.stats()["rails"])


def test_a_peer_begins_with_one_queue_pair_for_each_rail() -> None:
    pair = Pair("ab", nbytes=16 * MIB, rdma_queue_pairs=3)
    try:
        assert queue_pairs(pair.client) == 2
        pair.client.write(pair.peer, pair.local, pair.remote, 0, 0, 4096).wait(WAIT)
        assert queue_pairs(pair.client) == 2

        def all_are_there() -> bool:
            pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
            return queue_pairs(pair.client) == 6

        wait_until(all_are_there, "work for many to make more of them")
        assert np.array_equal(pair.remote_memory, pair.local_memory)
        assert pair.client.stats()["lane_errors"] == 0
    finally:
        pair.close()


class Many:
    """A client that may have fewer queue pairs than it has peers."""

    def __init__(self, stack: ExitStack) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        shared = {"transports": "rdma,tcp", "io_threads": 1, "connect_timeout": 20.0}
        self.client = stack.enter_context(
            TransferEngine(
                "client", require="rdma", rdma_devices="rxea0", rdma_queue_pairs_max=BOUND, listen=None, **shared
            )
        )
        self.local = np.zeros(PEERS * MIB, np.uint8)
        self.region = self.client.register(self.local)
        self.peers: list[Peer] = []
        for index in range(PEERS):
            server = stack.enter_context(TransferEngine(f"server {index}", rdma_devices="rxea1", **shared))
            server.register(np.full(MIB, index + 1, np.uint8), name="kv")
            self.peers.append(self.client.connect(str(server.address), timeout=WAIT))
            assert queue_pairs(self.client) <= BOUND

    def read_from(self, index: int) -> None:
        peer, begin = self.peers[index], index * MIB
        self.local[begin : begin + MIB] = 0
        self.client.read(peer, self.region, peer.regions["kv"], begin, 0, MIB).wait(WAIT)
        assert (self.local[begin : begin + MIB] == index + 1).all()
        assert queue_pairs(self.client) <= BOUND


@pytest.fixture
def many() -> Iterator[Many]:
    with ExitStack() as stack:
        yield Many(stack)


@pytest.mark.timeout(120)
def test_peers_take_turns_with_the_queue_pairs_that_there_are(many: Many) -> None:
    for _ in range(2):
        for index in range(PEERS):
            many.read_from(index)
    for index in np.random.default_rng(1).integers(0, PEERS, 20):
        many.read_from(int(index))
    assert {peer.path for peer in many.peers} == {"rdma"}
    many.client.close()
    assert queue_pairs(many.client) == 0


@pytest.mark.timeout(120)
def test_more_peers_at_work_than_there_are_queue_pairs(many: Many) -> None:
    peers = many.peers
    many.local[:] = 0
    for _ in range(4):
        reads = [many.client.read(p, many.region, p.regions["kv"], i * MIB, 0, MIB) for i, p in enumerate(peers)]
        for read in reads:
            read.wait(WAIT)
    assert all((many.local[i * MIB : (i + 1) * MIB] == i + 1).all() for i in range(PEERS))


@pytest.mark.timeout(120)
def test_300_peers_share_64_queue_pairs() -> None:
    count = 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (16384, 16384))
    with ExitStack() as stack:
        servers = []
        for index in range(count):
            server = stack.enter_context(
                TransferEngine(f"server {index}", transports="rdma,tcp", rdma_devices="rxea1", io_threads=1)
            )
            server.register(np.full(4096, index % 251, np.uint8), name="kv")
            servers.append(server)
        client = stack.enter_context(
            TransferEngine(
                "client",
                transports="rdma,tcp",
                require="rdma",
                rdma_devices="rxea0",
                rdma_queue_pairs_max=64,
                connect_timeout=20.0,
            )
        )
        local = np.zeros(count * 4096, np.uint8)
        region = client.register(local)
        begin = time.monotonic()
        peers = [client.connect(str(server.address), timeout=WAIT) for server in servers]
        reads = [client.read(peer, region, peer.regions["kv"], i * 4096, 0, 4096) for i, peer in enumerate(peers)]
        for read in reads:
            read.wait(WAIT)
        assert time.monotonic() - begin < 60.0
        assert queue_pairs(client) <= 64
        assert (local.reshape(count, 4096) == (np.arange(count) % 251)[:, None]).all()


def test_another_rail_of_the_peer_serves_until_the_one_that_was_meant_is_back() -> None:
    with StrangeServer("rxea1", MIB, rails=2) as server:
        server.refused.add(0)
        with TransferEngine("client", transports="rdma", rdma_devices="rxea0", connect_timeout=20.0) as client:
            region = client.register(np.full(MIB, 7, np.uint8))
            peer = client.connect(server.address, timeout=WAIT)
            client.write(peer, region, peer.regions["kv"]).wait(WAIT)
            assert server.connected == [1]
            server.refused.clear()
            server.say(rail=0, up=True)
            wait_until(lambda: server.connected[-1] == 0, "the lane to go back")
            server.buffer.write(bytes(MIB))
            client.write(peer, region, peer.regions["kv"]).wait(WAIT)
            assert server.buffer.read() == b"\7" * MIB
            # Told that it is down, the lane does not wait to find out.
            server.refused.add(0)
            server.say(rail=0, up=False)
            wait_until(lambda: server.connected[-1] == 1, "the lane to take the other rail")
            client.write(peer, region, peer.regions["kv"]).wait(WAIT)
            assert not server.errors
