# SPDX-License-Identifier: Apache-2.0
"""A mistake of the caller is an error at once, and no node is blamed for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_testing import key

from moonpool.cluster import LocalCluster
from moonpool.store_client import StoreArgumentError, StoreClient
from moonpool.transfer_engine import TransferEngine

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


# gRPC survives no fork: whatever of it the collector found in the child would end that.
FORKING = """
import gc, os, sys
from moonpool.store_client import StoreClient
from moonpool.transfer_engine import ForkedError
client = StoreClient(sys.argv[1], secret=sys.argv[2])
one = bytes(32)
client.put(sys.argv[3], [one], [b"x"]).require()
pin = client.pin(sys.argv[3], [one])
gc.disable()
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get(sys.argv[3], [one])[0] == b"x"
    pin.release()
    client.close()
    print("the parent goes on", flush=True)
    sys.exit(0)
refused = 0
for call in (
    lambda: client.get(sys.argv[3], [one]),
    lambda: client.put(sys.argv[3], [one], [b"x"]),
    lambda: client.exists(sys.argv[3], [one]),
    lambda: client.get_async(sys.argv[3], [one]),
    lambda: client.pin(sys.argv[3], [one]),
    client.stats,
    pin.release,
):
    try:
        call()
    except ForkedError:
        refused += 1
client.close()
os._exit(0 if refused == 7 else 1)
"""


def test_a_forked_child(user: StoreClient, shared_cluster: LocalCluster, namespace: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, shared_cluster.master, shared_cluster.secret, namespace],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "the parent goes on" in done.stdout, done.stderr
    assert user.exists(namespace, [bytes(32)])[0]


def test_a_pin_with_a_wrong_timeout_stays_held(user: StoreClient, namespace: str) -> None:
    pin = user.pin(namespace, [key(0)])
    with pytest.raises(StoreArgumentError):
        pin.release(timeout=-1)
    assert not pin.released
    pin.release()
    assert pin.released
