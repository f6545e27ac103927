# SPDX-License-Identifier: Apache-2.0
"""Pins hold chunks, belong to a session, and end with it."""

from __future__ import annotations

import subprocess
import sys

from engine_testing.leaks import eventually
from store_testing import content, key, keys

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import ChunkInUseError, Outcome, StoreClient


def test_a_pinned_chunk_stays(client: StoreClient, namespace: str) -> None:
    hashes = keys(3, namespace)
    client.put(namespace, hashes, [b"x" * 100] * 3).require()
    with client.pin(namespace, [*hashes[:2], key("nobody put this")]) as pin:
        assert pin.results.outcomes == bytes([Outcome.OK, Outcome.OK, Outcome.MISS])
        assert len(pin) == 2
        removed = client.remove(namespace, hashes)
        assert removed.outcomes == bytes([Outcome.FAILED, Outcome.FAILED, Outcome.OK])
        assert isinstance(removed.errors[0], ChunkInUseError)
        assert client.exists(namespace, hashes).tolist() == [True, True, False]
    assert pin.released
    pin.release()
    pin.release()
    assert client.remove(namespace, hashes[:2]).ok


def test_one_pin_does_not_end_another(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"x"]).require()
    first, second = client.pin(namespace, [hash_]), client.pin(namespace, [hash_])
    first.release()
    first.release()
    assert client.remove(namespace, [hash_]).count(Outcome.FAILED) == 1
    second.release()
    assert client.remove(namespace, [hash_]).ok


def test_nothing_to_pin(client: StoreClient, namespace: str) -> None:
    with client.pin(namespace, [key(namespace)]) as pin:
        assert len(pin) == 0
        assert pin.results.count(Outcome.MISS) == 1


def test_pins_end_with_their_client(shared_cluster: LocalCluster, client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [b"x"]).require()
    with shared_cluster.client() as other:
        other.pin(namespace, [hash_])
        assert client.remove(namespace, [hash_]).count(Outcome.FAILED) == 1
    assert eventually(lambda: client.remove(namespace, [hash_]).ok, 30)


PINNING = """
import signal, sys
from moonpool.store_client import StoreClient

master, secret, hashes = sys.argv[1:]
client = StoreClient(master, secret=secret)
client.pin("a", bytes.fromhex(hashes))
print("pinned", flush=True)
signal.pause()
"""


def test_pins_of_a_killed_process_end() -> None:
    with local_cluster(
        nodes=1, dram="16MiB", master_options={"session_timeout": "1s", "heartbeat_interval": "200ms"}
    ) as cluster:
        client = cluster.client()
        hashes = keys(4)
        client.put("a", hashes, [content(hash_, 100) for hash_ in hashes]).require()
        command = [sys.executable, "-c", PINNING, cluster.master, cluster.secret, b"".join(hashes).hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "pinned\n"
                assert client.remove("a", hashes).count(Outcome.FAILED) == 4
            finally:
                process.kill()
        assert eventually(lambda: client.remove("a", hashes[:1]).ok, 30)


def test_pins_outlive_the_master() -> None:
    with local_cluster(nodes=1, dram="16MiB", store="sqlite") as cluster, cluster.client() as client:
        hash_ = key(1)
        client.put("a", [hash_], [b"x" * 100]).require()
        pin = client.pin("a", [hash_])
        cluster.restart_master()
        assert eventually(lambda: client.stats()["master"]["sessions_opened"] == 2, 60)
        assert eventually(lambda: bool(client.exists("a", [hash_])[0]), 60)
        assert client.remove("a", [hash_]).count(Outcome.FAILED) == 1
        pin.release()
        assert client.remove("a", [hash_]).ok


def test_a_pin_says_that_its_chunks_were_lost_with_the_master() -> None:
    with local_cluster(nodes=1, dram="16MiB", store="memory") as cluster, cluster.client() as client:
        hashes = keys(4)
        client.put("a", hashes, [b"x" * 100] * 4).require()
        pin = client.pin("a", hashes)
        assert not pin.lost
        cluster.restart_master()
        assert eventually(lambda: pin.lost, 60)
        assert "lost" in repr(pin)
        pin.release()
        assert not pin.lost


def test_nobody_removes_what_is_pinned_in_the_moments_after_a_restart() -> None:
    with local_cluster(nodes=1, dram="16MiB", store="sqlite") as cluster, cluster.client() as client:
        hashes = keys(4)
        client.put("a", hashes, [b"x" * 100] * 4).require()
        with cluster.client() as holder, holder.pin("a", hashes) as pin:
            for _ in range(3):
                cluster.restart_master()
                assert client.remove("a", hashes).count(Outcome.OK) == 0
                assert eventually(lambda: bool(client.exists("a", hashes).all()), 60)
            assert not pin.lost
