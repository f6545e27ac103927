# SPDX-License-Identifier: Apache-2.0
"""A pool with two masters over etcd: whatever ends the one, the other leads, and what was committed is found again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from etcd_testing import SECONDS, Cluster
from master_testing import eventually
from store_testing import keys
from store_testing.disks import CLIENT, OPTIONS, cluster_of, fill, there_again

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.master.store import EtcdOptions
from moonpool.store_client import Outcome, StoreClient

QUICK = {
    "etcd_lease": "3s",
    "heartbeat_interval": "200ms",
    "lease_max": "500ms",
    "put_begin": "500ms",
}


@pytest.fixture
def pool(etcd: Cluster, etcd_options: Callable[..., EtcdOptions]) -> Iterator[LocalCluster]:
    prefix = etcd_options().root.split("/")[1]
    store = f"etcd:{etcd.endpoints}/{prefix}"
    with local_cluster(nodes=1, dram="16MiB", store=store, masters=2, master_options=QUICK) as cluster:
        yield cluster


def led_by(client: StoreClient) -> str:
    return str(client.stats()["master"]["address"])


def write(client: StoreClient, known: dict[bytes, bytes], count: int = 8) -> None:
    """Put chunks, and remember those that are said to be there."""
    keys = [os.urandom(32) for _ in range(count)]
    values = [os.urandom(2000) for _ in keys]
    put = client.put("ns", keys, values, timeout=SECONDS)
    put.require()
    known.update(zip(keys, values, strict=True))


def check(client: StoreClient, known: dict[bytes, bytes]) -> None:
    """Every chunk becomes a hit again, and never anything but what was put."""
    keys = list(known)

    def found() -> bool:
        got = client.get("ns", keys, timeout=SECONDS)
        for number, outcome in enumerate(got.outcomes):
            assert outcome != Outcome.OK or got[number] == known[keys[number]]
        return got.outcomes == bytes([Outcome.OK] * len(keys))

    eventually(found, "every chunk is a hit again")


@pytest.mark.parametrize("end", ["kill", "term", "stop"])
def test_another_master_leads_when_one_ends(pool: LocalCluster, end: str) -> None:
    known: dict[bytes, bytes] = {}
    with pool.client(timeout=SECONDS) as client:
        write(client, known)
        first = led_by(client)
        assert first == pool.master.split(",")[0]
        if end == "kill":
            pool.kill_master(0)
        elif end == "term":
            pool.stop_master(0)
        else:
            pool.signal_master(0, signal.SIGSTOP)
        check(client, known)
        assert led_by(client) == pool.master.split(",")[1]
        write(client, known)
        if end == "stop":
            # It goes on where it was, knows that it leads no longer, and changes nothing.
            pool.signal_master(0, signal.SIGCONT)
        else:
            pool.start_master(0)
        check(client, known)
        assert led_by(client) != first


def test_masters_end_in_turn_under_load(pool: LocalCluster) -> None:
    known: dict[bytes, bytes] = {}
    with pool.client(timeout=SECONDS) as client:
        for turn in range(4):
            write(client, known)
            (pool.restart_master if turn % 2 else pool.stop_master)(turn % 2)
            check(client, known)
            if not turn % 2:
                pool.start_master(0)
        write(client, known)
        check(client, known)


def test_a_hand_over_takes_no_longer_than_it_takes_to_notice(pool: LocalCluster) -> None:
    with pool.client(timeout=SECONDS) as client:
        write(client, {})
        pool.stop_master(0)
        began = time.monotonic()
        client.exists("ns", [os.urandom(32)])
        # Its lease would have gone on for as long as this.
        assert time.monotonic() - began < SECONDS / 2
        assert led_by(client) == pool.master.split(",")[1]


def test_what_is_on_disks_is_found_by_another_master(etcd: Cluster, etcd_options: Callable[..., EtcdOptions]) -> None:
    store = f"etcd:{etcd.endpoints}/{etcd_options().root.split('/')[1]}"
    options = {**OPTIONS, "etcd_lease": "3s"}
    with (
        cluster_of(store=store, masters=2, master_options=options) as cluster,
        cluster.client(**CLIENT, timeout=SECONDS) as client,
    ):
        kept = keys(20, "kept")
        fill(client, kept)
        fill(client, keys(30, "others"))
        cluster.kill_master(0)
        there_again(client, kept)
        assert led_by(client) == cluster.master.split(",")[1]
