# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the middle of a call: it ends, and nothing of it is in anybody's way."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from engine_testing.leaks import eventually
from store_testing import content, key

from moonpool import store_client
from moonpool.cluster import LocalCluster
from moonpool.store_client import StoreClient
from moonpool.transfer_engine.testing import Faults, FaultyEngine

CLIENT = os.path.join(os.path.dirname(store_client.__file__), "")  # noqa: PTH118, PTH120 - as code has it
STEPS = ("call", "c_return")


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
        # The node may be about to cut off what was interrupted.
        assert eventually(lambda: slow.get(namespace, [there])[0] == content(there, 1000), 30)
        # The half of a put was given up, so another one may begin.
        client.put(namespace, [mine], [content(mine, 1000)], timeout=60.0).require()
        assert slow.get(namespace, [mine])[0] == content(mine, 1000)


def interrupted_at(step: int, call: Callable[[], Any]) -> bool:
    """Raise KeyboardInterrupt in the client as the interpreter would, after so many steps. Returns whether it came."""
    left = step

    def count(frame: FrameType, event: str, _: Any) -> None:
        # After each call of C, and at the beginning of a function. What others write in Python is theirs, and what is
        # raised in a generator that is being ended is shown to nobody.
        nonlocal left
        code = frame.f_code
        if event in STEPS and code.co_filename.startswith(CLIENT) and not code.co_flags & inspect.CO_GENERATOR:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("what", ["get", "ranges", "registered", "put", "large get", "large put"])
def test_ctrl_c_between_any_two_steps_loses_no_staging(
    shared_cluster: LocalCluster, client: StoreClient, namespace: str, what: str
) -> None:
    hashes, large = [key(namespace, number) for number in range(3)], key(namespace, "large")
    client.put(namespace, hashes, [content(one, 300_000) for one in hashes]).require()
    client.put(namespace, [large], [bytes(1_100_000)]).require()
    with shared_cluster.client(staging_bytes="1MiB", lease=60.0) as mine:
        region, steps = mine.allocate(900_000), itertools.count()
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda: mine.get(namespace, hashes),
            "ranges": lambda: mine.get(namespace, hashes, ranges=(100, 50_000)),
            "registered": lambda: mine.get_into(namespace, hashes, (region, np.arange(3) * 300_000, 300_000)),
            "put": lambda: mine.put(namespace, [key(namespace, what, next(steps))], [bytes(100_000)]),
            "large get": lambda: mine.get(namespace, [large]),
            "large put": lambda: mine.put(namespace, [key(namespace, what, next(steps))], [bytes(1_100_000)]),
        }
        calls[what]()  # connected, and located
        for step in itertools.count():
            came = interrupted_at(step, calls[what])
            assert eventually(lambda: mine.stats()["staging_free_bytes"] == 1 << 20, 10), f"after {step} steps"
            client.remove(namespace, [key(namespace, what, step)])  # if it was put
            if not came:
                break
        assert step > 20
        assert list(mine.get(namespace, hashes)) == [content(one, 300_000) for one in hashes]


def test_a_transfer_that_nobody_knows_of_keeps_its_memory(
    shared_cluster: LocalCluster, client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"x" * 1000]).require()
    with shared_cluster.client(staging_bytes="1MiB") as mine:
        read = mine.engine.read

        def begun(*arguments: Any, **options: Any) -> None:
            read(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(mine.engine, "read", begun)
        with pytest.raises(KeyboardInterrupt):
            mine.get(namespace, [hash_])
        monkeypatch.undo()
        assert mine.stats()["staging_free_bytes"] < 1 << 20
        assert mine.get(namespace, [hash_])[0] == b"x" * 1000
