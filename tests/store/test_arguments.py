# SPDX-License-Identifier: Apache-2.0
"""Arguments that are wrong are refused before anything is asked, with what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_testing import key, keys

from moonpool.cluster import LocalCluster
from moonpool.store_client import StoreArgumentError, StoreClient


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(StoreArgumentError) as caught:
        call(*arguments, **named)
    assert caught.value.hint


@pytest.mark.parametrize("wrong", [None, 5, "", b"n", b"\xff\xfe", "\ud800", "x" * 256, "é" * 128])
def test_namespaces(client: StoreClient, wrong: Any) -> None:
    refused(client.put, wrong, [key(1)], [b"x"])
    for call in (client.get, client.exists, client.match_prefix, client.remove, client.pin):
        refused(call, wrong, [key(1)])
    refused(client.remove_prefix, wrong, key(1))


@pytest.mark.parametrize(
    "wrong", ["r", ("r",), ("", b""), (b"r", b""), ("\ud800", b""), ("x" * 256, b""), ("r", "e"), ("r", bytes(4097)), 5]
)
def test_rosters(shared_cluster: LocalCluster, wrong: Any) -> None:
    refused(shared_cluster.client, roster=wrong)


def test_who_is_in_a_roster_is_told_of_the_others(shared_cluster: LocalCluster, namespace: str) -> None:
    with shared_cluster.client(roster=(namespace, b"one")) as first:
        assert first.roster == ()
        with shared_cluster.client(roster=(namespace, b"two")) as second:
            assert second.roster == (b"one",)
        assert shared_cluster.client().roster == ()
    assert shared_cluster.client(roster=(namespace, bytes(4096))).roster == ()


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 63, 1 << 5000, 1.5, "1", True, None, np.float64(1)])
def test_shards_and_replicas(client: StoreClient, namespace: str, wrong: Any) -> None:
    for name in ("shard", "shards", "replicas"):
        refused(client.put, namespace, [key(1)], [b"x"], **{name: wrong})
    refused(client.get, namespace, [key(1)], shard=wrong)
    refused(client.get_into, namespace, [key(1)], [bytearray(1)], shard=wrong)
    refused(client.drain, wrong)
    assert not client.exists(namespace, [key(1)])[0]


def test_a_shard_is_one_of_the_shards(client: StoreClient, namespace: str) -> None:
    refused(client.put, namespace, [key(1)], [b"x"], shard=2, shards=2)
    refused(client.put, namespace, [key(1)], [b"x"], shards=0)
    refused(client.put, namespace, [key(1)], [b"x"], replicas=9)
    assert client.put(namespace, [key(1)], [b"x"], shard=np.int64(0), shards=np.uint8(1)).ok


@pytest.mark.parametrize("wrong", [-1, -0.5, math.nan, math.inf, -math.inf, 1e30, 1 << 5000, "5s", True])
def test_leases_and_timeouts(client: StoreClient, namespace: str, wrong: Any) -> None:
    refused(client.put, namespace, [key(1)], [b"x"], timeout=wrong)
    refused(client.segments, timeout=wrong)
    for call in (client.get, client.match_prefix):
        refused(call, namespace, [key(1)], lease=wrong)
        refused(call, namespace, [key(1)], timeout=wrong)


@pytest.mark.parametrize(
    "wrong",
    [5, (0,), (0, 1, 2), "ab", (1 << 63, 1), (1 << 64, 1), (1, 1 << 63), (0.5, 1), ("a", 1), (True, 1), ([0, 1], 1),
     (np.array([1 << 63], dtype=np.uint64), 5), (None, None), ([[0]], 1), ([], 1)],
)  # fmt: skip
def test_ranges(client: StoreClient, namespace: str, wrong: Any) -> None:
    refused(client.get, namespace, [key(1)], ranges=wrong)


@pytest.mark.parametrize(
    "wrong",
    [None, "x" * 32, ["x" * 32], [b"x" * 31], [memoryview(np.zeros(32, dtype=np.int64))], np.zeros(4), iter([key(1)]),
     memoryview(np.zeros(4, dtype=np.int64)), np.zeros((1, 32), dtype=np.int8), b"x" * 33, 5],
)  # fmt: skip
def test_hashes(client: StoreClient, namespace: str, wrong: Any) -> None:
    for call in (client.get, client.exists, client.match_prefix, client.remove, client.pin):
        refused(call, namespace, wrong)


def test_a_prefix_begins_at_one_chunk(client: StoreClient, namespace: str) -> None:
    for wrong in (bytes(64), b"1", "x", None):
        refused(client.remove_prefix, namespace, wrong)


def test_what_is_true_or_false(client: StoreClient, namespace: str) -> None:
    refused(client.put, namespace, [key(1)], [b"x"], verify="no")
    refused(client.drain, 1, undo=1)


def test_offsets_beyond_64_bits(client: StoreClient, namespace: str) -> None:
    region = client.allocate(100)
    for wrong in (1 << 63, np.array([(1 << 64) - 1], dtype=np.uint64)):
        refused(client.get_into, namespace, [key(1)], (region, wrong, 1))
    region.release()


def test_more_hashes_than_one_call_takes(shared_cluster: LocalCluster, namespace: str) -> None:
    with shared_cluster.client(batch_chunks=7) as client:
        chain = keys(40, namespace)
        client.put(namespace, chain[:30], [b"x"] * 30, parents=bytes(32)).require()
        assert client.exists(namespace, chain).tolist() == [True] * 30 + [False] * 10
        assert client.match_prefix(namespace, chain) == 30
        assert client.match_prefix(namespace, chain[:28], lease=0.001) == 28
        assert client.match_prefix(namespace, chain[29:]) == 1
        with client.pin(namespace, chain[20:]) as pin:
            assert len(pin) == 10
            assert client.remove(namespace, chain[18:]).where(*[0]) == [0, 1]
        assert pin.released
        removed = client.remove(namespace, chain)
        assert [removed.outcomes.count(outcome) for outcome in (0, 2)] == [28, 12]
        assert client.master_stats()["pins"] == 0
