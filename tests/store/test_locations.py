# SPDX-License-Identifier: Apache-2.0
"""What the master has said under a lease is used for a part of it, and given up on any doubt."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from engine_testing.leaks import eventually
from store_testing import content, key, keys, locate, spoil

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.proto.errors import MasterUnavailableError
from moonpool.store_client import ChunkConflictError, Outcome, StoreClient
from moonpool.store_client.locations import Locations
from moonpool.store_client.packing import EXTENT, NO_SEGMENT, Records
from moonpool.store_client.rpc import MasterIdentity

MASTER = MasterIdentity("c" * 32, "b" * 32, 1)
AFTER_RESTART = MasterIdentity("c" * 32, "d" * 32, 2)


def extents(*generations: int, replicas: int = 1) -> Records:
    made = np.zeros((len(generations), replicas), dtype=EXTENT)
    made["generation"] = np.array(generations)[:, None]
    return made


def lookups(client: StoreClient) -> int:
    return int(client.master_stats()["counts"].get("lookups_items", 0))


def test_all_of_a_batch_or_none() -> None:
    table = Locations(100)
    hashes = os.urandom(3 * 32)
    assert table.find("a", 0, hashes, MASTER, 0.0) is None
    table.keep("a", 0, hashes[:64], extents(7, 8), 10.0, MASTER, 0)
    assert table.find("a", 0, hashes, MASTER, 5.0) is None
    table.keep("a", 0, hashes[64:], extents(9, replicas=2), 6.0, MASTER, 0)
    found = table.find("a", 0, hashes[64:] + hashes[:64], MASTER, 5.0)
    assert found is not None
    assert found[0]["generation"][:, 0].tolist() == [9, 7, 8]
    assert found[0]["segment"][:, 1].tolist() == [0, NO_SEGMENT, NO_SEGMENT]
    assert found[1] == 6.0
    for other in (("b", 0, hashes, MASTER, 5.0), ("a", 1, hashes, MASTER, 5.0), ("a", 0, hashes, MASTER, 6.1)):
        assert table.find(*other) is None


def test_another_master_or_a_full_table_empties_it() -> None:
    table = Locations(4)
    hashes = os.urandom(6 * 32)
    table.keep("a", 0, hashes[:64], extents(1, 2), 10.0, MASTER, 0)
    assert table.find("a", 0, hashes[:64], AFTER_RESTART, 0.0) is None
    table.keep("a", 0, hashes[64:96], extents(3), 10.0, AFTER_RESTART, 0)
    assert table.find("a", 0, hashes[:64], MASTER, 0.0) is None
    assert table.find("a", 0, hashes[64:96], AFTER_RESTART, 0.0) is not None
    table.keep("a", 0, hashes[64:], extents(3, 4, 5, 6), 10.0, AFTER_RESTART, 0)
    assert table.find("a", 0, hashes[64:], AFTER_RESTART, 0.0) is not None
    table.keep("a", 0, hashes[:64], extents(1, 2), 10.0, AFTER_RESTART, 0)
    assert table.find("a", 0, hashes[64:], AFTER_RESTART, 0.0) is None
    table.keep("a", 0, hashes, extents(1, 2, 3, 4, 5, 6), 10.0, AFTER_RESTART, 0)  # more than there may be
    assert table.find("a", 0, hashes[:64], AFTER_RESTART, 0.0) is not None


def test_a_reply_that_is_older_than_what_was_forgotten_is_not_kept() -> None:
    table = Locations(100)
    hash_ = os.urandom(32)
    asked = table.forgotten
    table.forget("a", hash_)
    table.keep("a", 0, hash_, extents(1), 10.0, MASTER, asked)
    assert table.find("a", 0, hash_, MASTER, 0.0) is None


def test_what_a_get_has_found_spoilt_is_no_miss_when_it_is_dropped_meanwhile(
    shared_cluster: LocalCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = [spoilt, _] = keys(2, namespace)
    with shared_cluster.client(lease=5.0) as client, shared_cluster.client() as other:
        client.put(namespace, hashes, [content(hash_, 5000) for hash_ in hashes]).require()
        extent = locate(client, namespace, [spoilt])[0, 0]
        assert client.get(namespace, hashes).ok
        # Where they are is known from here on.
        spoil(other, extent, 64)
        report = client._core.report

        def dropped(*args: Any, **named: Any) -> None:
            report(*args, **named)
            assert eventually(lambda: not other.exists(namespace, [spoilt])[0], 30)

        monkeypatch.setattr(client._core, "report", dropped)
        found = client.get(namespace, hashes)
        assert client.stats()["gets_located_before"] == 2
        assert found.outcomes == bytes([Outcome.CORRUPT, Outcome.OK])
        assert {index: error.code for index, error in found.errors.items()} == {0: "CHUNK_CORRUPT"}
        assert client.get(namespace, [spoilt]).outcomes == bytes([Outcome.MISS])
        assert client.put(namespace, [spoilt], [content(spoilt, 5000)]).outcomes == bytes([Outcome.OK])


def test_a_hot_chunk_is_asked_for_once_in_half_a_lease(shared_cluster: LocalCluster, namespace: str) -> None:
    hashes = keys(8, namespace)
    values = [content(hash_, 5000) for hash_ in hashes]
    with shared_cluster.client() as client:
        client.put(namespace, hashes, values).require()
        before = lookups(client)
        for _ in range(5):
            assert list(client.get(namespace, hashes, lease=8.0)) == values
        assert list(client.get(namespace, hashes[2:4], ranges=(9, 100), lease=8.0)) == [
            value[9:109] for value in values[2:4]
        ]
        assert lookups(client) - before == 8
        assert client.stats()["gets_located_before"] == 4 * 8 + 2
        # What is left of a short lease is no good for a long one.
        assert list(client.get(namespace, hashes, lease=0.4)) == values
        assert lookups(client) - before == 8
        client._core.locations.clear()
        client.get(namespace, hashes, lease=0.4).require()
        client.get(namespace, hashes, lease=8.0).require()
        assert lookups(client) - before == 3 * 8


def test_match_prefix_with_a_lease_spares_the_get_its_question(shared_cluster: LocalCluster, namespace: str) -> None:
    hashes = keys(6, namespace)
    values = [content(hash_, 3000) for hash_ in hashes]
    with shared_cluster.client() as client:
        for shard in range(2):
            client.put(namespace, hashes[:5], values[:5], shard=shard, shards=2).require()
        for shard in (1, 0):
            assert client.match_prefix(namespace, hashes, lease=5.0, shard=shard) == 5
            before = lookups(client)
            assert list(client.get(namespace, hashes[:5], shard=shard, lease=5.0)) == values[:5]
            assert lookups(client) == before
        assert client.match_prefix(namespace, hashes, lease=5.0, shard=7) == 5
        assert client.get(namespace, hashes[:5], shard=7).count(Outcome.MISS) == 5


def test_what_this_client_removes_is_gone_for_it_at_once(client: StoreClient, namespace: str) -> None:
    hashes = keys(3, namespace)
    values = [content(hash_, 3000) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    client.get(namespace, hashes).require()
    client.remove(namespace, hashes[:1]).require()
    assert list(client.get(namespace, hashes)) == [None, *values[1:]]
    client.remove_prefix(namespace, hashes[1])
    assert list(client.get(namespace, hashes)) == [None, None, values[2]]


def test_what_this_client_puts_is_what_it_gets(
    shared_cluster: LocalCluster, client: StoreClient, namespace: str
) -> None:
    hashes = keys(4, namespace)
    with shared_cluster.client() as mine:
        mine.put(namespace, hashes, [b"1" * 100] * 4).require()
        mine.get(namespace, hashes).require()
        client.remove(namespace, hashes).require()
        client.put(namespace, hashes[2:], [b"3" * 300] * 2).require()
        assert mine.put(namespace, hashes[:1], [b"2" * 200]).count(Outcome.OK) == 1
        assert mine.get(namespace, hashes[:1])[0] == b"2" * 200
        # What is read back is what is there, not what was.
        with pytest.raises(ChunkConflictError):
            mine.put(namespace, hashes[2:3], [b"1" * 300], verify=True).require()
        assert mine.put(namespace, hashes[3:], [b"3" * 300]).count(Outcome.ALREADY) == 1
        assert mine.get(namespace, hashes[3:])[0] == b"3" * 300


def test_a_put_that_fails_may_have_changed_what_is_there(
    shared_cluster: LocalCluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_ = key(namespace)

    def find(client: StoreClient) -> object:
        return client._core.locations.find(namespace, 0, hash_, client._core.link.identity, 0.0)

    with shared_cluster.client() as client:
        client.put(namespace, [hash_], [b"1"]).require()
        client.get(namespace, [hash_]).require()
        assert find(client) is not None

        def unanswered(*_: object) -> None:
            raise MasterUnavailableError("no answer")

        monkeypatch.setattr(client._core.link, "call", unanswered)
        with pytest.raises(MasterUnavailableError):
            client.put(namespace, [hash_], [b"2"])
        assert find(client) is None


@pytest.mark.parametrize("kept", [True, False])
def test_what_another_client_removes_is_right_or_gone(
    shared_cluster: LocalCluster, client: StoreClient, namespace: str, kept: bool
) -> None:
    hash_ = key(namespace)
    value = content(hash_, 3000)
    with shared_cluster.client(locations_max=100 if kept else 0) as other:
        client.put(namespace, [hash_], [value]).require()
        assert other.get(namespace, [hash_], lease=0.5)[0] == value
        client.remove(namespace, [hash_]).require()
        end = time.monotonic() + 0.25
        # Its space is not used again before the lease is over, so these are its bytes.
        assert other.get(namespace, [hash_], lease=0.5)[0] == (value if kept and time.monotonic() < end else None)
        time.sleep(max(0.0, end - time.monotonic()))
        assert other.get(namespace, [hash_], lease=0.5)[0] is None


def test_a_place_that_fails_is_asked_for_again() -> None:
    # The node is gone and another one has the chunk by now.
    hash_ = key()
    value = content(hash_, 100_000)
    with (
        local_cluster(nodes=1, dram="32MiB", store="memory") as cluster,
        cluster.client(lease=30.0) as client,
        cluster.client() as other,
    ):
        client.put("a", [hash_], [value]).require()
        assert client.get("a", [hash_])[0] == value
        known = client._core.locations.find("a", 0, hash_, client._core.link.identity, 0.0)
        assert known is not None
        other.remove("a", [hash_]).require()
        wrong = known[0].copy()
        wrong["generation"] += 1
        client._core.locations.keep("a", 0, hash_, wrong, known[1], client._core.link.identity, 0)
        other.put("a", [hash_], [value]).require()
        assert client.get("a", [hash_])[0] == value


@pytest.mark.parametrize("room", [4, 100])
def test_what_is_not_there_any_more_is_forgotten(room: int) -> None:
    table = Locations(room)
    hashes = os.urandom(5 * 32)
    table.keep("a", 0, hashes[:32], extents(7), 10.0, MASTER, 0)
    table.keep("a", 1, hashes[:32], extents(8), 10.0, MASTER, 0)
    found = extents(0, 1, 2, 3, 4)
    found["segment"][0] = NO_SEGMENT
    table.keep("a", 0, hashes, found, 10.0, MASTER, 0)
    assert table.find("a", 0, hashes[:32], MASTER, 0.0) is None
    assert table.find("a", 1, hashes[:32], MASTER, 0.0) is None


def test_shards_of_two_versions_are_not_known_together() -> None:
    table = Locations(100)
    hashes = os.urandom(2 * 32)
    for shard in (0, 1):
        table.keep("a", shard, hashes, extents(1 + shard, 11 + shard), 10.0, MASTER, 0)
    # The first chunk was put anew, the second is what it was.
    table.keep("a", 0, hashes, extents(5, 11), 10.0, MASTER, 0)
    assert table.find("a", 0, hashes, MASTER, 0.0) is not None
    assert table.find("a", 1, hashes[:32], MASTER, 0.0) is None
    assert table.find("a", 1, hashes[32:], MASTER, 0.0) is not None


def test_a_miss_is_not_followed_by_bytes_of_before(client: StoreClient, shared_cluster: LocalCluster) -> None:
    other = shared_cluster.client()
    hash_, space = key("gone"), os.urandom(8).hex()
    client.put(space, [hash_], [content(hash_, 100)]).require()
    assert client.match_prefix(space, [hash_], lease=5) == 1
    other.remove(space, [hash_])
    assert client.get(space, [hash_, key("never there")], lease=1).outcomes == bytes([Outcome.MISS] * 2)
    assert client.get(space, [hash_], lease=1).outcomes == bytes([Outcome.MISS])
