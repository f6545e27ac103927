# SPDX-License-Identifier: Apache-2.0
"""Queue pairs: made when there is work for them, given up when others need them, and on which rail of the peer."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from moonpool.transfer_engine import TransferEngine
from rdma_lab.inside.links import wait_until
from rdma_lab.inside.pair import MIB, WAIT, Pair
from rdma_lab.inside.stranger import StrangeServer


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
    """A client that may have fewer queue pairs than it has peers.

    Args:
        stack: closes everything.
        count: how many peers.
        bound: how many queue pairs the client may have.
        nbytes: of the region of each peer.
    """

    def __init__(self, stack: ExitStack, count: int, bound: int, nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16384, 16384))
        self.bound, self.nbytes = bound, nbytes
        shared = {"transports": "rdma,tcp", "connect_timeout": 20.0}
        self.client = stack.enter_context(
            TransferEngine("client", require="rdma", rdma_devices="rxea0", rdma_queue_pairs_max=bound, **shared)
        )
        self.local = np.zeros((count, nbytes), np.uint8)
        self.region = self.client.register(self.local)
        servers = []
        for index in range(count):
            server = stack.enter_context(
                TransferEngine(f"server {index}", rdma_devices="rxea1", io_threads=1, **shared)
            )
            server.register(np.full(nbytes, index % 251 + 1, np.uint8), name="kv")
            servers.append(server)
        self.peers = [self.client.connect(str(server.address), timeout=WAIT) for server in servers]
        assert queue_pairs(self.client) <= bound

    def read(self, indices: Iterable[int]) -> None:
        """Read from these peers at once and see that the bytes are theirs."""
        indices = list(indices)
        self.local[indices] = 0
        begun = [
            self.client.read(peer, self.region, peer.regions["kv"], index * self.nbytes, 0, self.nbytes)
            for index, peer in ((index, self.peers[index]) for index in indices)
        ]
        for read in begun:
            # Hundreds take turns, and the machine is slow.
            read.wait(2 * WAIT)
        assert (self.local[indices] == np.array(indices)[:, None] % 251 + 1).all()
        assert queue_pairs(self.client) <= self.bound


@pytest.fixture
def many() -> Iterator[Many]:
    with ExitStack() as stack:
        yield Many(stack, 12, 4, MIB)


@pytest.mark.timeout(120)
def test_peers_take_turns_with_the_queue_pairs_that_there_are(many: Many) -> None:
    for index in (*range(12), *range(12), *np.random.default_rng(1).integers(0, 12, 20)):
        many.read([int(index)])
    assert {peer.path for peer in many.peers} == {"rdma"}
    many.client.close()
    assert queue_pairs(many.client) == 0


@pytest.mark.timeout(120)
def test_more_peers_at_work_than_there_are_queue_pairs(many: Many) -> None:
    for _ in range(4):
        many.read(range(12))


@pytest.mark.timeout(240)
def test_300_peers_share_64_queue_pairs() -> None:
    with ExitStack() as stack:
        many = Many(stack, 300, 64, 4096)
        many.read(range(300))


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
