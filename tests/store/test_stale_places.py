# SPDX-License-Identifier: Apache-2.0
"""Where a chunk was located means something only to the cluster that said so, and only until it is verified."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from engine_testing.leaks import eventually
from store_testing import content, key, keys, locate, spoil, unheard

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import ChunkTooLargeError, Outcome, StoreClient
from moonpool.store_client.errors import ClusterChangedError
from moonpool.store_client.staging import Slice

SIZE = 1 << 20


@pytest.fixture
def forgetful() -> Iterator[tuple[LocalCluster, StoreClient, StoreClient]]:
    """A pool with a master that remembers nothing, a client that can be held up, and another one."""
    with (
        local_cluster(nodes=1, dram="64MiB", store="memory") as cluster,
        cluster.client(timeout=60.0, lease=30.0, staging_bytes="4MiB") as slow,
        cluster.client(timeout=60.0, staging_bytes="4MiB") as other,
    ):
        slow.put("warm", [key(0)], [b"w" * 4096]).require()
        yield cluster, slow, other


def hold_up(client: StoreClient) -> Slice:
    """Take all of its staging, so that calls wait between the answer of the master and the transfer."""
    return client._core.staging.take(client._core.staging.nbytes, time.monotonic() + 10)


def hear(client: StoreClient) -> None:
    assert eventually(lambda: client.stats()["master"]["restarts_seen"] > 0, 60)


def put_soon(client: StoreClient, hashes: list[bytes], values: list[bytes]) -> None:
    assert eventually(lambda: client.put("other", hashes, values).ok, 60)


@pytest.mark.parametrize("heard", [False, True], ids=["at once", "when it has heard of it"])
def test_a_put_that_straddles_a_restart_spoils_nothing(
    forgetful: tuple[LocalCluster, StoreClient, StoreClient], heard: bool
) -> None:
    cluster, slow, other = forgetful
    mine, theirs = keys(8, "mine"), keys(4, "theirs")
    held = hold_up(slow)
    waiting = slow.put_async("a", mine, [b"A" * 4096] * 8)
    assert eventually(lambda: other.master_stats()["index"]["writing"] == 8, 60)
    cluster.restart_master()
    put_soon(other, theirs, [b"B" * SIZE] * 4)
    if heard:
        hear(slow)
    slow._core.staging.give_back(held)
    waiting.result(60).require()
    assert list(slow.get("a", mine)) == [b"A" * 4096] * 8
    assert list(other.get("other", theirs)) == [b"B" * SIZE] * 4
    assert all(segment.state == 0 for segment in other.segments())
    if heard:  # before that, a node that lends other memory looks like one that has gone
        assert slow.stats()["segments_avoided"] == []
        assert slow.stats()["segment_failures"] == 0


def test_a_get_that_straddles_a_restart_is_a_miss(forgetful: tuple[LocalCluster, StoreClient, StoreClient]) -> None:
    cluster, slow, other = forgetful
    looked_up = other.master_stats()["counts"].get("lookups_items", 0)
    held = hold_up(slow)
    waiting = slow.get_async("warm", [key(0)])
    assert eventually(lambda: other.master_stats()["counts"].get("lookups_items", 0) > looked_up, 60)
    cluster.restart_master()
    put_soon(other, keys(8), [b"B" * 4096] * 8)
    hear(slow)
    slow._core.staging.give_back(held)
    assert waiting.result(60).outcomes == bytes([Outcome.MISS])
    assert slow.stats()["segment_failures"] == 0
    assert slow.stats().get("corrupt_found", 0) == 0
    assert all(segment.state == 0 for segment in other.segments())


def test_a_number_of_another_cluster_names_no_segment(client: StoreClient) -> None:
    core, gone = client._core, "0" * 32
    number = client.segments()[0].segment
    with pytest.raises(ClusterChangedError):
        core.segments.target(number, gone, time.monotonic() + 10)
    before = client.stats()
    core.failed(number, gone, ClusterChangedError("whatever happened there"))
    core.segments.failed(number, gone, None)
    core.report(number, gone, ClusterChangedError("whatever happened there"))
    assert client.stats()["segments_avoided"] == before["segments_avoided"] == []
    assert core.segments.target(number, core.link.cluster, time.monotonic() + 10).segment == number


@pytest.mark.parametrize("registered", [False, True])
def test_a_range_of_a_spoilt_chunk_is_never_wrong(
    client: StoreClient, namespace: str, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard(client, monkeypatch)
    # Damage behind the header, as by a writer that was stopped past its deadline. Only the digest tells.
    hashes = keys(2, namespace)
    values = [content(hash_, 100_000) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    spoil(client, locate(client, namespace, hashes)[0, 0], 64 + 50_000)
    region = client.allocate(2000)
    for begin in (0, 49_500, 99_000):
        if registered:
            found = client.get_into(namespace, hashes, (region, np.array([0, 1000]), 1000), ranges=(begin, 1000))
            assert bytes(region)[1000:] == values[1][begin : begin + 1000]
        else:
            found = client.get(namespace, hashes, ranges=(begin, 1000))
            assert list(found) == [None, values[1][begin : begin + 1000]]
        assert found.outcomes == bytes([Outcome.CORRUPT, Outcome.OK])
        assert found.lengths == [0, 1000]


def test_a_range_reads_the_copy_that_is_good(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    value = content(hash_, 10_000)
    client.put(namespace, [hash_], [value], replicas=2).require()
    spoil(client, locate(client, namespace, [hash_])[0, 0], 64 + 5)
    for _ in range(4):
        assert client.get(namespace, [hash_], ranges=(9_000, 500))[0] == value[9_000:9_500]


def test_a_range_whose_leaves_are_larger_than_staging_names_the_setting(
    shared_cluster: LocalCluster, namespace: str
) -> None:
    with shared_cluster.client(staging_bytes="1MiB") as client:
        hash_, size = key(namespace), 8 << 20
        value = content(hash_, size)
        client.put(namespace, [hash_], [value]).require()
        assert client.get(namespace, [hash_], ranges=(5, 100))[0] == value[5:105]
        found = client.get(namespace, [hash_] * 2, ranges=([0, 5], [1 << 20, 100]))
        assert list(found) == [None, value[5:105]]
        assert isinstance(found.errors[0], ChunkTooLargeError)
        assert "staging_bytes" in str(found.errors[0])
