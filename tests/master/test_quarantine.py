# SPDX-License-Identifier: Apache-2.0
"""M5: who is believed when somebody says that a segment cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from master_testing import Member, eventually, hashes

from moonpool.master import Master
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20


class Pool:
    """Nodes of one segment each, and a client."""

    def __init__(self, start_master: Start, join: Join, nodes: int) -> None:
        self.master = start_master(quarantine=0.3)
        self.nodes = [join(self.master, pb.NODE, host=f"node-{number}") for number in range(nodes)]
        self.segments = [node.mount(MIB) for node in self.nodes]
        self.client = join(self.master, host="client")

    def state(self, node: int) -> int:
        state: int = self.client.segments()[self.segments[node]].state
        return state

    def verdicts(self) -> int:
        probes: int = self.master.server.core.metrics.counts["probes"]
        return probes

    def report(self, node: int) -> None:
        """Report, and wait until it has led to a probe that is over."""
        before = self.verdicts()

        def probed() -> bool:
            self.client.report(self.segments[node])
            return self.verdicts() > before

        eventually(probed, "a probe")
        eventually(lambda: not self.master.server.core.probes.under_way, "its end")


@pytest.fixture
def pool(start_master: Start, join: Join) -> Callable[[int], Pool]:
    return lambda nodes: Pool(start_master, join, nodes)


def test_one_reporter_is_enough_when_other_nodes_cannot_read_there_either(pool: Callable[[int], Pool]) -> None:
    its = pool(3)
    its.nodes[1].reaches = its.nodes[2].reaches = False
    chunks = hashes(64)
    its.client.put(chunks)
    its.report(0)
    assert its.state(0) == pb.QUARANTINED
    order = its.nodes[1].probes[0]
    assert (order.address, order.region, order.incarnation) == ("127.0.0.1:1", "pool", its.nodes[0].incarnation)
    assert its.client.put(hashes(64)) == bytes(64), "the others take what comes"
    time.sleep(0.7)
    assert its.state(0) == pb.QUARANTINED, "nobody can read there yet"
    its.nodes[1].reaches = its.nodes[2].reaches = True
    eventually(lambda: its.state(0) == pb.ACTIVE, "it is back")
    assert its.client.exists(chunks) == bytes(64)


@pytest.mark.parametrize("alone", [False, True])
def test_one_liar_costs_no_node(pool: Callable[[int], Pool], alone: bool) -> None:
    its = pool(1 if alone else 3)
    for _ in range(3):
        its.report(0)
        assert its.state(0) == pb.ACTIVE
    for _ in range(50):
        its.client.report(its.segments[0])
    # One at a time, and not one after the other without end.
    assert its.verdicts() <= 10


def test_a_prober_with_a_bad_nic_costs_no_node_either(pool: Callable[[int], Pool]) -> None:
    its = pool(3)
    its.nodes[1].reaches = False
    its.report(0)
    assert its.state(0) == pb.ACTIVE
    # Nor does one that is silent, while the node itself answers.
    its.nodes[1].reaches = its.nodes[2].reaches = None
    its.report(0)
    assert its.state(0) == pb.ACTIVE


def test_a_node_that_answers_nothing_is_out_although_nobody_else_can_be_asked(pool: Callable[[int], Pool]) -> None:
    its = pool(1)
    its.nodes[0].reaches = None
    its.report(0)
    assert its.state(0) == pb.QUARANTINED
    time.sleep(0.7)
    assert its.state(0) == pb.QUARANTINED
    its.nodes[0].reaches = True
    eventually(lambda: its.state(0) == pb.ACTIVE, "it is back")


def test_two_clients_of_one_host_count_as_one(pool: Callable[[int], Pool], join: Join) -> None:
    its = pool(2)
    second, other = join(its.master, host="client"), join(its.master, host="another")
    its.client.report(its.segments[0])
    second.report(its.segments[0])
    assert its.state(0) == pb.ACTIVE
    other.report(its.segments[0])
    assert its.state(0) == pb.QUARANTINED, "two that agree"


def test_an_answer_that_nobody_asked_for_says_nothing(pool: Callable[[int], Pool], join: Join) -> None:
    its = pool(2)
    its.nodes[0].reaches = its.nodes[1].reaches = None
    its.client.report(its.segments[0])
    eventually(lambda: its.nodes[0].probes and its.nodes[1].probes, "orders")
    for number in range(5):
        its.client.say(pb.HeartbeatRequest(probe_done=pb.ProbeDone(probe=number, works=True)))
    eventually(lambda: its.state(0) == pb.QUARANTINED, "a verdict by those who were asked")
