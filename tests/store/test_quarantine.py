# SPDX-License-Identifier: Apache-2.0
"""The master's own probe, with nodes that read: a node that is really bad is out for everybody after one report."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
from engine_testing.leaks import eventually
from store_testing import content, key, keys

from moonpool.cluster import local_cluster
from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import StoreClient

# The node that stands still must not be lost meanwhile: then it would be out for another reason.
OPTIONS: dict[str, Any] = {"session_timeout": "60s", "heartbeat_interval": "200ms", "quarantine": "300ms"}


def states(client: StoreClient) -> dict[str, int]:
    return {segment.node: segment.state for segment in client.segments()}


def probes(client: StoreClient) -> int:
    counts = json.loads(client._core.call("Stats", pb.StatsRequest(), time.monotonic() + 10).json)["counts"]
    assert counts["probes_failed"] == 0
    return int(counts["probes"])


def report(client: StoreClient, node: str) -> None:
    number = next(segment.segment for segment in client.segments() if segment.node == node)
    client._core.report(number, client._core.link.cluster, MoonpoolError("a test"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_report_is_enough_for_a_node_that_stands_still(nodes: int) -> None:
    with local_cluster(nodes=nodes, dram="16MiB", master_options=OPTIONS) as cluster, cluster.client() as client:
        hashes = keys(16, nodes)
        client.put("a", hashes, [content(hash_, 5000) for hash_ in hashes]).require()
        cluster.signal_node(0, signal.SIGSTOP)
        began = time.monotonic()
        report(client, "node-0")
        assert eventually(lambda: states(client)["node-0"] == pb.QUARANTINED, 30)
        assert time.monotonic() - began < 10, "the design says one second; a loaded machine that pauses is given more"
        assert all(state == pb.ACTIVE for node, state in states(client).items() if node != "node-0")
        cluster.signal_node(0, signal.SIGCONT)
        assert eventually(lambda: states(client)["node-0"] == pb.ACTIVE, 30), "it answers, so it is back"
        for hash_, found in zip(hashes, client.get("a", hashes), strict=True):
            assert found == content(hash_, 5000)


def test_one_client_that_is_wrong_costs_no_node() -> None:
    with local_cluster(nodes=2, dram="16MiB", master_options=OPTIONS) as cluster, cluster.client() as client:
        client.put("a", [key(0)], [b"x"]).require()
        for rounds in range(1, 4):
            report(client, "node-0")
            assert eventually(lambda rounds=rounds: probes(client) >= rounds, 30)
        assert set(states(client).values()) == {pb.ACTIVE}
