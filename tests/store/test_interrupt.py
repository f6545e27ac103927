# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the middle of a call: it ends, and nothing of it is in anybody's way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_testing.leaks import eventually
from store_testing import content, key

from moonpool.cluster import LocalCluster
from moonpool.store_client import StoreClient
from moonpool.transfer_engine.testing import Faults, FaultyEngine


def interrupted(call: Callable[[], Any]) -> None:
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        timer.cancel()
        timer.join()


def test_ctrl_c_ends_a_call(shared_cluster: LocalCluster, client: StoreClient, namespace: str) -> None:
    there, mine = key(namespace, 0), key(namespace, 1)
    client.put(namespace, [there], [content(there, 1000)]).require()
    secret = shared_cluster.secret.encode()
    with (
        FaultyEngine(Faults(drop=1.0), listen=None, secret=secret) as engine,
        # Nothing but Ctrl-C is to end it.
        shared_cluster.client(engine=engine, staging_bytes="1MiB", progress_timeout=60.0, lease=60.0) as slow,
    ):
        interrupted(lambda: slow.get(namespace, [there], timeout=60.0))
        interrupted(lambda: slow.put(namespace, [mine], [content(mine, 1000)], timeout=60.0))
        assert eventually(lambda: slow.stats()["staging_free_bytes"] == 1 << 20, 60)
        engine.set_faults(Faults())
        assert slow.get(namespace, [there])[0] == content(there, 1000)
        # The half of a put was given up, so another one may begin.
        client.put(namespace, [mine], [content(mine, 1000)], timeout=60.0).require()
        assert slow.get(namespace, [mine])[0] == content(mine, 1000)
