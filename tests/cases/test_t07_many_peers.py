# SPDX-License-Identifier: Apache-2.0
"""T7.

What people met: two hundred peers connecting at once took 96 s and left half of the connections dead.

What must happen instead: concurrent handshakes; all usable within seconds.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import fill
from engine_testing.processes import Target

from moonpool.transfer_engine.testing import FaultProxy, Reorder

PROCESSES = 6
ENGINES_EACH = 50


def connect_from_everywhere(address: str) -> None:
    """Connect from several processes at once, and see that every peer reads the right bytes."""
    with contextlib.ExitStack() as closing, ThreadPoolExecutor(PROCESSES) as pool:
        # Only bounds a hang: a machine that is very busy needs its time.
        targets = [closing.enter_context(Target(timeout=280.0)) for _ in range(PROCESSES)]
        answers = [
            pool.submit(target.ask, "connect_many", address=address, count=ENGINES_EACH, name="kv")
            for target in targets
        ]
        assert [answer.result() for answer in answers] == [ENGINES_EACH] * PROCESSES


def test_three_hundred_peers_connect_at_once_and_all_work(open_engine: OpenEngine) -> None:
    server = open_engine("server", transports="tcp", secret=None)
    fill(server.allocate(1 << 16, name="kv"))
    connect_from_everywhere(server.address or "")
    serving = server.stats()["serving"]
    assert serving["handshakes_refused"] == serving["handshakes_broken"] == 0
    assert eventually(lambda: server.stats()["serving"]["sessions"] == 0)


def test_they_all_work_whatever_order_the_network_brings_them_in(open_engine: OpenEngine) -> None:
    """Lanes may overtake the control connections of other peers, and arrive in any order."""
    server = open_engine("server", transports="tcp")
    fill(server.allocate(1 << 16, name="kv"))
    with FaultProxy(server.address or "", seed=7) as network:
        network.apply(Reorder(hold=32, seconds=(0.0, 0.02)))
        connect_from_everywhere(network.address)
    assert eventually(lambda: server.stats()["serving"]["sessions"] == 0)
