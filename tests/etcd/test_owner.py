# SPDX-License-Identifier: Apache-2.0
"""Who may write: one at a time, and nobody who has been deposed, whatever he thinks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from etcd_testing import SECONDS, Cluster, put, read, slots, take_turn
from master_testing import call, eventually, stub

from moonpool.master import Master
from moonpool.master.errors import StoreBusyError, StoreLostError, StoreUnavailableError
from moonpool.master.store import EtcdOptions, EtcdStore, SegmentRow
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import NotLeaderError

Open = Callable[[EtcdOptions], EtcdStore]

_WRITES = """
import sys
from etcd_testing import EtcdOptions, put
from moonpool.master.store import EtcdStore
import dataclasses
options = dataclasses.replace(EtcdOptions.parse(sys.argv[1]), lease=1.0)
store = EtcdStore(options); print(store.open().epoch, flush=True)
turn = 0
while True:
    turn += 1
    error = put(store, {7: b"%d of the first" % turn}).exception(60)
    print(turn if error is None else type(error).__name__, flush=True)
    if error is not None:
        break
store.close()
"""


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def key_of(cluster: Cluster, options: EtcdOptions) -> dict[str, object]:
    """Return what the key of the leader says, and its lease."""
    said = json.loads(cluster.ctl("get", f"{options.root}/leader", "-w", "json").stdout)
    kvs = said.get("kvs", [])
    return {"lease": f"{kvs[0]['lease']:x}"} if kvs else {}


def revoke(cluster: Cluster, options: EtcdOptions) -> None:
    cluster.ctl("lease", "revoke", str(key_of(cluster, options)["lease"]))


def test_one_leads_and_the_other_is_told(etcd_options: Callable[..., EtcdOptions], opened: Open) -> None:
    first = EtcdStore(etcd_options())
    first.open("10.0.0.1:7600")
    with pytest.raises(StoreBusyError, match=r"10\.0\.0\.1:7600") as caught:
        opened(etcd_options())
    assert caught.value.leader == "10.0.0.1:7600"
    first.close()


def test_a_standby_waits_and_takes_over(etcd_options: Callable[..., EtcdOptions], opened: Open) -> None:
    first, second = opened(etcd_options()), EtcdStore(etcd_options())
    put(first, {1: b"one"}).result(SECONDS)
    with pytest.raises(StoreBusyError):
        second.open()
    second.wait_for_turn(0.3)
    put(first, {2: b"two"}).result(SECONDS)
    first.close()
    take_turn(second)
    assert second._follower is not None, "what the first one wrote was followed"
    assert read(second) == {1: b"one", 2: b"two"}
    assert second._follower is None
    second.close()


def test_what_a_standby_follows_is_what_is_there(etcd_options: Callable[..., EtcdOptions], opened: Open) -> None:
    first, second = opened(etcd_options()), EtcdStore(etcd_options())
    put(first, dict.fromkeys(range(100), b"old")).result(SECONDS)
    with pytest.raises(StoreBusyError):
        second.open()
    second.wait_for_turn(0.01)
    follower = second._follower
    assert follower is not None
    eventually(lambda: follower.revision, "everything is read")
    put(first, dict.fromkeys(range(50, 150), b"new")).result(SECONDS)
    first.apply(b"", b"", slots(*range(25))).result(SECONDS)
    first.put_segment(SegmentRow(1, "node", "host", "127.0.0.1:1", "pool", bytes(16), 1 << 20)).result(SECONDS)
    first.close()
    take_turn(second)
    assert read(second) == {slot: b"old" if slot < 50 else b"new" for slot in range(25, 150)}
    assert [row.segment for row in second.segments()] == [1]
    second.close()


def test_a_lease_that_is_over_is_taken_again_where_nobody_else_has_led(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    options = etcd_options()
    store = opened(options)
    put(store, {1: b"before"}).result(SECONDS)
    revoke(etcd, options)
    put(store, {2: b"after"}).result(SECONDS)
    assert read(store) == {1: b"before", 2: b"after"}
    eventually(lambda: store.leading, "the lease")
    assert store.taken.done() is False


def test_a_deposed_leader_writes_nothing_and_knows_it(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    options = etcd_options()
    first = opened(options)
    put(first, {1: b"first"}).result(SECONDS)
    # It renews no more, as if it stood still, but what it sends arrives.
    for task in first._tasks:
        first._loop.call_soon_threadsafe(task.cancel)
    revoke(etcd, options)
    second = opened(options)
    put(second, {1: b"second"}).result(SECONDS)
    changes = [put(first, {slot: b"late"}) for slot in range(1, 400)]
    for change in changes:
        assert isinstance(change.exception(SECONDS), StoreLostError)
    assert isinstance(first.taken.result(SECONDS), StoreLostError)
    assert not first.leading
    assert isinstance(first.apply(b"", b"", b"").exception(SECONDS), StoreLostError)
    assert read(second) == {1: b"second"}
    first.close()
    assert second.leading, "the end of the first one is nothing to the second"
    put(second, {2: b"second"}).result(SECONDS)


def test_one_that_was_stopped_and_goes_on_cannot_write(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    options = etcd_options()
    place = f"{etcd.endpoints}{options.root.rpartition('/')[0]}"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES, place], stdout=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        assert process.stdout is not None
        try:
            epoch = int(process.stdout.readline())
            for _ in range(3):
                assert process.stdout.readline().strip().isdecimal()
            process.send_signal(signal.SIGSTOP)
            second = EtcdStore(options)
            assert take_turn(second).epoch > epoch
            put(second, {7: b"the second"}).result(SECONDS)
            process.send_signal(signal.SIGCONT)
            said = process.stdout.read().split()
            assert said[-1] == "StoreLostError"
            assert read(second) == {7: b"the second"}
            second.close()
        finally:
            process.kill()


def test_after_kill_9_the_next_one_need_not_be_told_to_wait(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    options = etcd_options()
    place = f"{etcd.endpoints}{options.root.rpartition('/')[0]}"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES, place], stdout=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            last = process.stdout.readline()
        process.kill()
        rest = process.stdout.read().split()
    last = rest[-1] if rest else last
    store = EtcdStore(options)
    take_turn(store)
    found = int(read(store)[7].split()[0])
    store.close()
    assert found in (int(last), int(last) + 1)


def test_a_master_that_is_deposed_serves_no_more_and_waits(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open, start_master: Callable[..., Master]
) -> None:
    options = etcd_options()
    prefix = options.root.split("/")[1]
    master = start_master(store=f"etcd:{etcd.endpoints}/{prefix}", etcd_lease=1.0, http=None)
    role = master.server.role
    channel, pool = stub(master.address)
    with channel:
        call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=bytes(32)))
        store = master.server._store
        assert isinstance(store, EtcdStore)
        for task in store._tasks:
            store._loop.call_soon_threadsafe(task.cancel)
        revoke(etcd, options)
        other = EtcdStore(options)
        other.open("10.0.0.1:7600")
        # It has asked nobody for so long that it cannot know whether it leads.
        eventually(lambda: not store.leading, "the end of its lease")
        with pytest.raises(NotLeaderError):
            call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=bytes(32)), timeout=5.0)
        assert isinstance(put(store, {1: b"late"}).exception(SECONDS), StoreLostError)
        eventually(lambda: role.waits and role.leader == "10.0.0.1:7600", "it waits for its turn again")
        other.close()
        eventually(lambda: role.turns == 2, "another turn")
        call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=bytes(32)))


def test_etcd_that_is_not_there_is_an_error_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.master.store.etcd.owner._ANSWER", 0.5)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1\b"):
        EtcdStore(EtcdOptions.parse("127.0.0.1:1")).open()
