# SPDX-License-Identifier: Apache-2.0
"""Copies on several nodes, and bytes that are not what they should be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store_testing import content, key, keys, locate, spoil, unheard

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import ChunkCorruptError, NodeUnreachableError, Outcome, StoreClient

HEADER = 64


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[LocalCluster]:
    # Two clients that report a segment have it quarantined, which is not for others to suffer.
    with local_cluster(nodes=2, dram="16MiB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(own_cluster: LocalCluster) -> StoreClient:
    return own_cluster.client()


def test_copies_are_on_different_nodes(client: StoreClient, namespace: str) -> None:
    hashes = keys(20, namespace)
    put = client.put(namespace, hashes, [content(hash_, 3000) for hash_ in hashes], replicas=2)
    put.require()
    assert put.replicas == bytes([2] * 20)
    extents = locate(client, namespace, hashes)
    assert extents.shape == (20, 2)
    assert (extents["segment"][:, 0] != extents["segment"][:, 1]).all()
    assert (extents["offset"] % 64 == 0).all()


def test_fewer_hosts_than_copies_are_seen(client: StoreClient, namespace: str) -> None:
    hashes = keys(3, namespace)
    client.put(namespace, hashes[:1], [b"x"]).require()
    put = client.put(namespace, hashes, [b"x"] * 3, replicas=3)
    assert put.ok
    # What was there already has been written by somebody else.
    assert put.replicas == bytes([0, 2, 2])
    assert client.get(namespace, hashes).replicas == b""


@pytest.mark.parametrize(
    "at",
    [0, 4, 8, 16, 24, 32, 63, HEADER, HEADER + 2999],
    ids=["magic", "shard", "generation", "length", "digest", "hash", "end of hash", "first byte", "last byte"],
)
def test_a_spoilt_copy_is_never_given_out(
    client: StoreClient, namespace: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard(client, monkeypatch)
    hash_, good = key(namespace), key(namespace, "good")
    client.put(namespace, [hash_, good], [content(hash_, 3000), content(good, 3000)]).require()
    spoil(client, locate(client, namespace, [hash_])[0, 0], at)
    found = client.get(namespace, [hash_, good])
    assert found.outcomes == bytes([Outcome.CORRUPT, Outcome.OK])
    assert found[0] is None
    assert isinstance(found.errors[0], ChunkCorruptError)
    room = [bytearray(b"." * 3000)]
    assert client.get_into(namespace, [hash_], room).count(Outcome.CORRUPT) == 1
    assert room[0] == b"." * 3000
    # Whoever puts it again after having seen that, writes it anew.
    assert client.put(namespace, [hash_], [content(hash_, 3000)]).outcomes == bytes([Outcome.OK])
    assert client.get(namespace, [hash_])[0] == content(hash_, 3000)


def test_what_somebody_else_has_put_since_stays(
    own_cluster: LocalCluster, client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard(client, monkeypatch)
    first, second = keys(2, namespace)
    for shard in range(2):
        client.put(namespace, [first, second], [content(first, 3000)] * 2, shard=shard, shards=2).require()
    for hash_ in (first, second):
        spoil(client, locate(client, namespace, [hash_])[0, 0], HEADER)
    assert client.get(namespace, [first, second]).count(Outcome.CORRUPT) == 2
    # That the other shard is good says nothing of this one.
    assert client.get(namespace, [first, second], shard=1).ok
    with own_cluster.client() as other:
        other.remove(namespace, [first]).require()
        for shard in range(2):
            other.put(namespace, [first], [content(first, 3000)], shard=shard, shards=2).require()
        there = locate(other, namespace, [first])
        with other.pin(namespace, [second]):
            put = client.put(namespace, [first, second], [content(first, 3000)] * 2, shards=2)
        assert put.outcomes == bytes([Outcome.ALREADY] * 2)
        assert (locate(other, namespace, [first]) == there).all()
        assert other.get(namespace, [first])[0] == content(first, 3000)
    # It could not be removed, and is when it can be.
    put = client.put(namespace, [first, second], [content(first, 3000)] * 2, shards=2)
    assert put.outcomes == bytes([Outcome.ALREADY, Outcome.OK])


def test_the_other_copy_is_read_then(client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unheard(client, monkeypatch)
    hashes = keys(30, namespace)
    client.put(namespace, hashes, [content(hash_, 3000) for hash_ in hashes], replicas=2).require()
    for index, row in enumerate(locate(client, namespace, hashes)):
        # Of copies that take turns by the number of the chunk, now the one and now the other.
        spoil(client, row[index // 2 % 2], HEADER + index)
    before = client.stats().get("corrupt_found", 0)
    for _ in range(2):
        assert list(client.get(namespace, hashes)) == [content(hash_, 3000) for hash_ in hashes]
    assert client.stats()["corrupt_found"] > before


def test_a_range_is_checked_by_its_header(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    client.put(namespace, [hash_], [content(hash_, 3000)]).require()
    spoil(client, locate(client, namespace, [hash_])[0, 0], 8)
    assert client.get(namespace, [hash_], ranges=(10, 20)).outcomes == bytes([Outcome.CORRUPT])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_node_that_dies_is_read_around(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", transport)
    with local_cluster(nodes=2, dram="32MiB") as cluster, cluster.client() as client:
        both, one = keys(20, "both"), keys(20, "one")
        client.put("a", both, [content(hash_, 5000) for hash_ in both], replicas=2).require()
        client.put("a", one, [content(hash_, 5000) for hash_ in one]).require()
        gone = {segment.segment for segment in client.segments() if segment.node == "node-0"}
        cluster.kill_node(0)
        assert list(client.get("a", both)) == [content(hash_, 5000) for hash_ in both]
        found = client.get("a", one)
        for index, value in enumerate(found):
            if value is not None:
                assert value == content(one[index], 5000)
            elif found.outcomes[index] == Outcome.FAILED:
                assert isinstance(found.errors[index], NodeUnreachableError)
        assert set(client.stats()["segments_avoided"]) <= gone


def test_one_node_is_enough_for_fewer_copies() -> None:
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client() as client:
        client.put("a", [key(1)], [b"x" * 100], replicas=2).require()
        assert client.get("a", [key(1)])[0] == b"x" * 100


def test_strangers_have_no_say(shared_cluster: LocalCluster, namespace: str) -> None:
    from moonpool.store_client import AuthenticationError

    for secret in ("another", None):
        with pytest.raises(AuthenticationError):
            StoreClient(shared_cluster.master, secret=secret, startup_timeout=5.0)
