# SPDX-License-Identifier: Apache-2.0
"""A mistake of the caller is an error at once, and no node is blamed for it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_testing import key

from moonpool.cluster import LocalCluster
from moonpool.store_client import StoreArgumentError, StoreClient
from moonpool.transfer_engine import ForkedError, TransferEngine

#: Far less than what a put waits for a node that does not answer.
SOON = 3.0


@pytest.fixture
def user(shared_cluster: LocalCluster, namespace: str) -> Iterator[StoreClient]:
    with shared_cluster.client() as user:
        user.put(namespace, [key(0)], [b"x" * 100]).require()
        yield user
        stats = user.stats()
        assert stats["segments_avoided"] == []
        assert stats["segment_failures"] == 0
        assert all(segment.state == 0 for segment in user.segments())
        assert user.get(namespace, [key(0)])[0] == b"x" * 100


def refused(call: Callable[..., Any], *arguments: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(StoreArgumentError) as caught:
        call(*arguments)
    assert caught.value.hint
    assert time.monotonic() - begin < SOON


def test_a_region_of_another_engine(user: StoreClient, namespace: str) -> None:
    with TransferEngine("another", listen=None) as other:
        region = other.allocate(100)
        refused(user.put, namespace, [key(1)], (region, 0, 100))
        refused(user.get_into, namespace, [key(0)], (region, 0, 100))
        refused(user.get_into, namespace, [key("never put")], (region, 0, 100))


def test_a_released_region(user: StoreClient, namespace: str) -> None:
    region = user.allocate(100)
    region.release()
    refused(user.put, namespace, [key(1)], (region, 0, 100))
    refused(user.get_into, namespace, [key(0)], (region, 0, 100))


def test_a_region_that_is_released_while_a_put_waits(user: StoreClient, namespace: str) -> None:
    region = user.allocate(100)
    held = user._core.staging.take(user._core.staging.nbytes, time.monotonic() + 10)
    raised: list[BaseException] = []

    def put() -> None:
        try:
            user.put(namespace, [key(1)], (region, 0, 100))
        except StoreArgumentError as error:
            raised.append(error)

    waiting = threading.Thread(target=put)
    waiting.start()
    while not user.master_stats()["index"]["writing"]:
        time.sleep(0.01)
    region.release()
    user._core.staging.give_back(held)
    waiting.join(60)
    assert len(raised) == 1
    # What was begun has been given up, so that others can put it.
    user.put(namespace, [key(1)], [b"y" * 100], timeout=60).require()


def test_a_read_only_destination(user: StoreClient, namespace: str) -> None:
    region = user.engine.register(bytearray(100), writable=False)
    refused(user.get_into, namespace, [key(0)], (region, 0, 100))
    user.put(namespace, [key(2)], (region, 0, 100)).require()
    region.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child(user: StoreClient, namespace: str) -> None:
    pin = user.pin(namespace, [key(0)])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b""
        try:
            for call in (
                lambda: user.get(namespace, [key(0)]),
                lambda: user.put(namespace, [key(3)], [b"x"]),
                lambda: user.exists(namespace, [key(0)]),
                lambda: user.get_async(namespace, [key(0)]),
                lambda: user.pin(namespace, [key(0)]),
                pin.release,
                user.stats,
            ):
                with contextlib.suppress(ForkedError):
                    call()
                    said += b"-"
                said += b"."
            user.close()
            said += b"closed"
        finally:
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    watchdog = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    watchdog.start()
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b".......closed"
    os.waitpid(child, 0)
    watchdog.cancel()
    with pytest.raises(StoreArgumentError):
        pin.release(timeout=-1)
    assert not pin.released
    pin.release()
