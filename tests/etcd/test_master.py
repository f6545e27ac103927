# SPDX-License-Identifier: Apache-2.0
"""A master with its metadata in etcd: what is committed outlives it, and what it says meanwhile is true."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from etcd_testing import SECONDS, Cluster
from master_testing import Member, call, eventually, hashes, stub

from moonpool.master.store import EtcdOptions
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import NotLeaderError

Join = Callable[..., Member]
MIB = 1 << 20


def leads(address: str) -> bool:
    channel, pool = stub(address)
    with channel:
        try:
            call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=hashes(1)))
        except NotLeaderError:
            return False
        return True


@pytest.fixture
def run(etcd: Cluster, etcd_options: Callable[..., EtcdOptions]) -> Iterator[Callable[[], str]]:
    """Starts a master, after killing the one before with -9, and returns its address."""
    prefix = etcd_options().root.split("/")[1]
    quick = {"HEARTBEAT_INTERVAL": "0.2", "PUT_BEGIN": "0.3", "LEASE_MAX": "0.5", "RAMP_UP": "0", "ETCD_LEASE": "1"}
    environment = os.environ | {f"MOONPOOL_MASTER_{name}": value for name, value in quick.items()}
    command = [sys.executable, "-m", "moonpool.cli", "master", "--listen", "127.0.0.1:0", "--http", "none"]
    command += ["--store", f"etcd:{etcd.endpoints}/{prefix}"]
    processes: list[subprocess.Popen[str]] = []

    def kill() -> None:
        for process in processes:
            process.kill()
            process.communicate(timeout=SECONDS)
        processes.clear()

    def run_() -> str:
        kill()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().split()[-1]

    yield run_
    kill()


def test_every_committed_chunk_is_a_hit_again_after_kill_9(run: Callable[[], str], join: Join) -> None:
    """M6: master restarted: cached data orphaned and overwritten, or everything lost."""
    address = run()
    node = join(address, pb.NODE, host="node-0")
    segment = node.mount(64 * MIB)
    client = join(address)
    kept, removed = hashes(1500), hashes(300)
    assert client.put(kept + removed, 1000) == bytes(1800)
    assert client.remove(removed) == bytes(300)
    before = client.header

    address = run()
    # The lease of the one before goes on for a moment.
    eventually(lambda: leads(address), "its turn")
    client = join(address, session=client.id, incarnation=client.incarnation)
    assert client.header.cluster_id == before.cluster_id
    assert client.header.epoch > before.epoch
    back = join(address, pb.NODE, host="node-0", session=node.id, incarnation=node.incarnation)
    assert back.mount(64 * MIB, segment=segment) == segment
    assert client.exists(kept) == bytes(1500)
    assert client.exists(removed) == bytes([pb.NOT_FOUND] * 300)
    eventually(lambda: client.start(hashes(64)).statuses == bytes(64), "room")
    assert join(address, pb.NODE, host="node-1").mount(MIB) > segment
