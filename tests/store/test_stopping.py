# SPDX-License-Identifier: Apache-2.0
"""Masters that are stopped in good order, under callers who are not to notice."""

from __future__ import annotations

import threading

from store_testing import content, keys

from moonpool.cluster import local_cluster

SPACE = "stopping"


def test_a_master_that_is_stopped_in_good_order_fails_no_call() -> None:
    hashes = keys(40, SPACE)
    options = {"lease_max": "200ms", "put_begin": "200ms"}
    with local_cluster(nodes=1, dram="16MiB", store="sqlite", master_options=options) as cluster:
        client = cluster.client(timeout=60)
        client.put(SPACE, hashes, [content(one, 500) for one in hashes]).require()
        over, failures, calls = threading.Event(), [], []

        def ask() -> None:
            try:
                while not over.is_set():
                    client.exists(SPACE, hashes)
                    client.get(SPACE, hashes[:3])
                    client.match_prefix(SPACE, hashes)
                    calls.append(1)
            except Exception as error:  # noqa: BLE001  # all of them are told below
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            cluster.stop_master()
            cluster.start_master()
        over.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert calls
