# SPDX-License-Identifier: Apache-2.0
"""M5.

What people met: one of two store processes killed: for 11 s half of all puts failed, each after a second; elsewhere
one client's bad NIC had a healthy node thrown out for everybody.

What must happen instead: the client avoids the node at once and re-places in the same call (< 1 s); the master
quarantines after its own probe or a second reporter, and takes the node back when it answers.

How long puts take: tests/store/test_failures.py. Who is believed: tests/master/test_quarantine.py and
tests/store/test_quarantine.py.
"""

from __future__ import annotations

from store_testing import content, keys

from moonpool.cluster import local_cluster
from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb


def test_no_put_fails_around_a_death_and_one_reporter_costs_no_node() -> None:
    with local_cluster(nodes=2, dram="16MiB") as cluster, cluster.client() as client:
        for number in [segment.segment for segment in client.segments()]:
            client._core.report(number, client._core.link.cluster, MoonpoolError("a bad NIC"))
        for round_ in range(20):
            if round_ == 5:
                cluster.kill_node(0)
            hashes = keys(8, round_)
            client.put("a", hashes, [content(hash_, 20_000) for hash_ in hashes]).require()
        assert client.get("a", hashes).ok
        alive = next(segment for segment in client.segments() if segment.node == "node-1")
        assert alive.state == pb.ACTIVE
