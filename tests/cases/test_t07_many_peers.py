# SPDX-License-Identifier: Apache-2.0
"""T7.

What people met: two hundred peers connecting at once took 96 s and left half of the connections dead.

What must happen instead: concurrent handshakes; all usable within seconds.
"""

from __future__ import annotations

import threading

from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import fill
from engine_testing.processes import Target

PROCESSES = 6
ENGINES_EACH = 50


def test_three_hundred_peers_connect_at_once_and_all_work(open_engine: OpenEngine) -> None:
    server = open_engine("server", transports="tcp", secret=None)
    fill(server.allocate(1 << 16, name="kv"))
    targets = [Target() for _ in range(PROCESSES)]
    good: list[int] = []
    try:

        def connect_many(target: Target) -> None:
            good.append(target.ask("connect_many", address=server.address, count=ENGINES_EACH, name="kv"))

        threads = [threading.Thread(target=connect_many, args=(target,)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for target in targets:
            target.close()
    assert good == [ENGINES_EACH] * PROCESSES
    serving = server.stats()["serving"]
    assert serving["handshakes_refused"] == serving["handshakes_broken"] == 0
    assert eventually(lambda: server.stats()["serving"]["sessions"] == 0)
