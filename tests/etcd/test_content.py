# SPDX-License-Identifier: Apache-2.0
"""What is under the keys, and what is made of it when it is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from etcd_testing import SECONDS, Cluster, put, read, record, slots

from moonpool.errors import ConfigError
from moonpool.master import MasterSettings
from moonpool.master.errors import StoreDamagedError
from moonpool.master.store import EtcdOptions, EtcdStore, SegmentRow, Writer, open_store
from moonpool.master.store.etcd.calls import Members

Open = Callable[[EtcdOptions], EtcdStore]


def row(segment: int) -> SegmentRow:
    return SegmentRow(segment, "node", "host", "127.0.0.1:1", "pool", bytes(range(16)), 1 << 30)


def test_a_change_of_many_slots_goes_in_parts_and_many_changes_go_together(
    etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    store = opened(etcd_options())
    content = {slot: b"%d" % slot for slot in range(1000)}
    put(store, content).result(SECONDS)
    parts = store.stats()["transactions"]
    assert parts == 8
    changes = [put(store, {2000 + slot: b"one"}) for slot in range(1000)]
    for change in changes:
        change.result(SECONDS)
    assert store.stats()["transactions"] - parts < 1000
    assert store.stats()["writes"] == 2000
    assert len(read(store, page=70)) == 2000


def test_small_changes_overtake_a_large_one_but_not_where_they_have_a_slot_in_common(
    etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    store = opened(etcd_options())
    large = put(store, dict.fromkeys(range(20000), b"large"))
    small = put(store, {30_000: b"small"})
    same = put(store, {19_999: b"same"})
    small.result(SECONDS)
    assert not large.done()
    same.result(SECONDS)
    assert large.done()
    assert read(store)[19_999] == b"same"


def test_large_records_do_not_go_into_one_transaction(etcd_options: Callable[..., EtcdOptions], opened: Open) -> None:
    store = opened(etcd_options())
    # Etcd takes no request of more than 1.5 MiB.
    content = {slot: bytes(30_000) for slot in range(128)}
    put(store, content).result(SECONDS)
    assert read(store) == content


def test_a_load_outlives_the_compaction_of_its_revision(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    store = opened(etcd_options())
    content = {slot: b"%d" % slot for slot in range(100)}
    put(store, content).result(SECONDS)
    pages = store.load(10)
    found = [next(pages), next(pages)]
    etcd.ctl("put", "something", "else")
    now = json.loads(etcd.ctl("endpoint", "status", "-w", "json").stdout)[0]["Status"]["header"]["revision"]
    etcd.ctl("compact", str(now))
    found += list(pages)
    assert b"".join(numbers for numbers, _ in found) == slots(*content)


def test_a_disk_comes_back_as_one(etcd_options: Callable[..., EtcdOptions], opened: Open) -> None:
    options = etcd_options()
    store = opened(options)
    rows = [row(1), replace(row(2), region="")]
    for one in rows:
        store.put_segment(one).result(SECONDS)
    store.close()
    found = opened(options).segments()
    assert found == rows
    assert [one.disk for one in found] == [False, True]


def test_damaged_rows_are_refused_by_themselves(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open
) -> None:
    options = etcd_options()
    store = opened(options)
    put(store, {1: b"good", 2: b"bad"}).result(SECONDS)
    writer = Writer(bytes(range(16)), bytes(16))
    for change in (store.put_segment(row(1)), store.put_segment(row(2)), store.put_namespace("ns", 1)):
        change.result(SECONDS)
    store.put_writer(writer).result(SECONDS)
    for key, value in (
        ("chunks/00000002", "this is no record"),
        ("chunks/stray", "nor is this"),
        ("segments/00000002", "{"),
        ("writers/00", "00"),
    ):
        etcd.ctl("put", f"{options.root}/{key}", value)
    store.close()
    store = opened(options)
    assert store.segments()[0] == row(1)
    assert store.segments()[1].lost
    assert store.writers() == [writer]
    pages = list(store.load(100))
    assert b"".join(numbers for numbers, _ in pages) == slots(1, 2)
    assert b"".join(records for _, records in pages) == record(b"good") + bytes(4)
    assert store.stats()["refused_chunks"] == 2
    assert store.stats()["refused_writers"] == 1
    # The index names what it has refused; what has no slot is removed by the store.
    store.apply(b"", b"", slots(2)).result(SECONDS)
    assert "stray" not in etcd.ctl("get", "--prefix", f"{options.root}/chunks", "--keys-only").stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", "x"),
        ("epoch", '{"epoch": -1, "etcd_cluster": ""}'),
        ("cluster_id", "00"),
        ("segment_last", "00000000"),
    ],
)
def test_what_makes_the_whole_useless_is_refused(
    etcd: Cluster, etcd_options: Callable[..., EtcdOptions], opened: Open, key: str, value: str
) -> None:
    options = etcd_options()
    store = opened(options)
    store.put_segment(row(3)).result(SECONDS)
    store.close()
    etcd.ctl("put", f"{options.root}/{key}", value)
    with pytest.raises(StoreDamagedError, match=options.root):
        opened(options)


def test_settings_say_where_it_is() -> None:
    settings = MasterSettings.load(
        {"store": "etcd:a:1,[::1]:2/pools/x/", "cluster": "prod", "etcd_user": "me", "etcd_password": "secret"},
        environ={},
    )
    options = EtcdOptions.parse(settings.store.partition(":")[2], settings)
    assert [str(place) for place in options.endpoints] == ["a:1", "[::1]:2"]
    assert options.root == "/pools/x/prod"
    assert "secret" not in repr(options)
    with pytest.raises(ConfigError, match="go together"):
        open_store("etcd:a:1", MasterSettings.load({"etcd_user": "me"}, environ={}))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ConfigError, match=r"pip install 'moonpool\[etcd\]'"):
        open_store("etcd:127.0.0.1:1")


def test_nothing_is_asked_twice_where_all_is_well(
    etcd_options: Callable[..., EtcdOptions], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(etcd_options())
    asked: list[str] = []
    attempt = Members.attempt

    async def counted(members: Members, method: str, request: Any) -> Any:
        asked.append(method)
        return await attempt(members, method, request)

    monkeypatch.setattr(Members, "attempt", counted)
    for turn in range(10):
        put(store, {turn: b"x"}).result(SECONDS)
    assert asked.count("Txn") == 10
    assert store.stats()["fences"] == 0
