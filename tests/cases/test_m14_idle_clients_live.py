# SPDX-License-Identifier: Apache-2.0
"""M14.

What people met: an idle client was reaped as dead because its heartbeat started with its first request.

What must happen instead: heartbeat from registration on, independent of traffic and of I/O threads.

Of the master alone: `test_an_idle_session_lives` in tests/master/test_sessions.py.
"""

from __future__ import annotations

import time

from store_testing import key

from moonpool.cluster import local_cluster

OPTIONS = {"session_timeout": "800ms", "heartbeat_interval": "100ms"}


def test_clients_and_nodes_that_do_nothing_for_longer_than_the_timeout_are_there() -> None:
    with local_cluster(nodes=1, dram="4MiB", master_options=OPTIONS) as cluster:
        idle, busy = cluster.client(), cluster.client()
        busy.put("a", [key(0)], [b"x"]).require()
        held = busy.pin("a", [key(0)])
        time.sleep(1.7)
        assert idle.get("a", [key(0)])[0] == b"x"
        assert [segment.segment for segment in idle.segments()] == [1]
        assert not held.lost
        assert (idle._core.session.opened, busy._core.session.opened) == (1, 1)
