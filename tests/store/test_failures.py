# SPDX-License-Identifier: Apache-2.0
"""Nodes that die or hang: no put fails, and the time until it is placed elsewhere is short (case M5)."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
from engine_testing.leaks import eventually
from store_testing import content, key, keys, say

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import ROOT, NodeUnreachableError, NoSpaceError, Outcome, StoreClient
from moonpool.transfer_engine import Transfer

# The design says one second; a loaded machine that pauses is given more.
PLACED_AGAIN_MAX = 10.0


def put_for(client: StoreClient, seconds: float, tag: object) -> list[float]:
    """Put batches of 8 for so long, all of which must succeed. Returns how long each took."""
    took = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(took) < 10:
        hashes = keys(8, tag, len(took))
        begin = time.monotonic()
        client.put("a", hashes, [content(hash_, 20_000) for hash_ in hashes]).require()
        took.append(time.monotonic() - begin)
    return took


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_put_fails_when_one_of_two_nodes_is_killed(
    transport: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", transport)
    with local_cluster(nodes=2, dram="64MiB") as cluster, cluster.client() as client:
        took: list[float] = []
        worker = threading.Thread(target=lambda: took.extend(put_for(client, 2.0, "while")))
        worker.start()
        time.sleep(0.5)
        cluster.kill_node(0)
        worker.join()
        after = put_for(client, 0.5, "after")
        say(capsys, f"{transport}: slowest put around the death of a node {1000 * max(took + after):.0f} ms")
        assert len(took) >= 10
        assert max(took + after) < PLACED_AGAIN_MAX


def test_no_put_fails_when_a_node_hangs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Over TCP: to shared memory a client needs nobody.
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", "tcp")
    with local_cluster(nodes=2, dram="64MiB") as cluster, cluster.client() as client:
        put_for(client, 0.2, "before")
        cluster.signal_node(0, signal.SIGSTOP)
        took = put_for(client, 0.5, "stopped")
        say(capsys, f"slowest put around a node that hangs {1000 * max(took):.0f} ms")
        assert max(took) < PLACED_AGAIN_MAX
        assert len(client.stats()["segments_avoided"]) <= 1
        cluster.signal_node(0, signal.SIGCONT)


def test_without_any_node_a_put_says_why() -> None:
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client(space_wait=0.2) as client:
        client.put("a", [key(0)], [b"x" * 100]).require()
        cluster.kill_node(0)
        failed = client.put("a", [key(1)], [b"x" * 100], timeout=3.0)
        assert failed.outcomes == bytes([Outcome.FAILED])
        assert isinstance(failed.errors[0], (NodeUnreachableError, NoSpaceError))
        assert failed.errors[0].retryable
        # A node that comes back is used again.
        cluster.start_node(0)
        client.put("a", [key(2)], [b"y" * 100], timeout=60.0).require()
        assert client.get("a", [key(2)])[0] == b"y" * 100


def test_a_full_pool_makes_room_or_says_when() -> None:
    with local_cluster(nodes=1, dram="4MiB") as cluster, cluster.client(space_wait=0.3) as client:
        hashes = keys(300)
        for begin in range(0, 300, 10):
            some = hashes[begin : begin + 10]
            client.put("a", some, [content(hash_, 60_000) for hash_ in some]).require()
        held = client.exists("a", hashes)
        assert 20 < held.sum() < 70
        alive = [hash_ for hash_, there in zip(hashes, held, strict=True) if there]
        with client.pin("a", alive):
            refused = client.put("a", keys(60, "more"), [b"x" * 60_000] * 60)
            failed = refused.where(Outcome.FAILED)
            assert failed
            error = refused.errors[failed[0]]
            assert isinstance(error, NoSpaceError)
            assert error.retryable
            assert error.retry_after > 0
        client.put("a", keys(20, "later"), [b"x" * 60_000] * 20, timeout=60).require()


@pytest.mark.parametrize("timeout", [1.0, 4.0])  # less than the master waits for room in one call, and in two
def test_a_put_with_less_time_than_the_wait_for_room_says_what_had_none(timeout: float) -> None:
    with local_cluster(nodes=1, dram="4MiB") as cluster, cluster.client(space_wait=5.0) as client:
        held = keys(13)
        client.put("a", held, [b"x" * 300_000] * 13).require()
        with client.pin("a", held):
            begin = time.monotonic()
            results = client.put("a", keys(2, "more"), [b"y" * 100, b"z" * 300_000], timeout=timeout)
            assert time.monotonic() - begin >= timeout / 2
        assert results.outcomes == bytes([Outcome.OK, Outcome.FAILED])
        assert isinstance(results.errors[1], NoSpaceError)


def test_puts_of_a_killed_client_do_not_stay_in_the_way(shared_cluster: LocalCluster) -> None:
    code = (
        "import os, sys\n"
        "from moonpool.store_client import StoreClient\n"
        "from moonpool.proto import pool_pb2 as pb\n"
        "import time, struct\n"
        "client = StoreClient(sys.argv[1], secret=sys.argv[2])\n"
        "client._core.call('PutStart', pb.PutStartRequest(session=client._core.session.id, namespace='a',\n"
        "    hashes=bytes.fromhex(sys.argv[3]), lengths=struct.pack('<Q', 1000)), time.monotonic() + 10)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    import subprocess
    import sys

    options = {"session_timeout": "1s", "heartbeat_interval": "100ms", "put_begin": "500ms"}
    with local_cluster(nodes=1, dram="16MiB", master_options=options) as cluster, cluster.client() as client:
        hash_ = key("half a put")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        ended = subprocess.run(
            [sys.executable, "-c", code, cluster.master, cluster.secret, hash_.hex()],
            env=environment, check=False, timeout=60,
        )  # fmt: skip
        assert ended.returncode == -9
        client.put("a", [hash_], [content(hash_, 1000)], timeout=60).require()
        assert client.get("a", [hash_])[0] == content(hash_, 1000)


@pytest.mark.parametrize("policy", ["prefix", "s3fifo", "lru"])
def test_four_times_the_capacity_from_eight_clients(policy: str) -> None:
    size, batch, capacity = 30_000, 8, 8 << 20
    rounds = 4 * capacity // (8 * batch * size) + 1
    with local_cluster(nodes=2, dram="4MiB", master_options={"policy": policy}) as cluster:
        failed: list[object] = []

        def write(number: int) -> None:
            with cluster.client(staging_bytes="1MiB", timeout=60.0, lease=0.1) as client:
                for round_ in range(rounds):
                    chain = keys(batch, number, round_)
                    results = client.put("a", chain, [content(one, size) for one in chain], parents=ROOT)
                    failed.extend(results.errors.values())
                    for one, value in zip(chain, client.get("a", chain), strict=True):
                        if value is not None and value != content(one, size):
                            failed.append(one)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_a_writer_that_was_stopped_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 7 << 20
    options = {"put_begin": "300ms", "put_deadline": "500ms"}
    with (
        local_cluster(nodes=1, dram="8MiB", master_options=options) as cluster,
        cluster.client(space_wait=0.2) as slow,
        cluster.client(space_wait=0.2) as other,
    ):
        engine, value = slow._core.engine, content(key("other"), size)
        write, put_in, pins = engine.write, threading.Event(), list[Any]()

        def late(*args: Any, **options: Any) -> Transfer:
            # As if the process had been stopped just before, until its place was somebody else's.
            if not put_in.is_set():
                assert eventually(lambda: other.put("a", [key("other")], [value]).ok, 60)
                pins.append(other.pin("a", [key("other")]))
                put_in.set()
            return write(*args, **options)

        monkeypatch.setattr(engine, "write", late)
        assert not slow.put("a", [key("slow")], [content(key("slow"), size)], timeout=60.0).ok
        assert put_in.is_set()
        # The one place that there is holds what was put there last, whole.
        assert other.get("a", [key("other")])[0] == value
