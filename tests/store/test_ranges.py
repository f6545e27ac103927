# SPDX-License-Identifier: Apache-2.0
"""Ranges of chunks: exactly the bytes that were put, at the cost of the leaves touched, and never wrong ones."""

from __future__ import annotations

import dataclasses
import random
import time

import numpy as np
import pytest
from store_testing import content, key, keys, locate, spoil, unheard

from moonpool._index import extent_bytes
from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import Outcome, StoreClient
from moonpool.store_client.leaves import leaves_of, table_bytes
from moonpool.store_client.packing import HEADER_BYTES
from moonpool.transfer_engine import LEAF_BYTES, TransferEngine
from moonpool.transfer_engine.testing import Faults, FaultyEngine

LEAF = LEAF_BYTES
SIZES = [1, 8, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF, 4 * LEAF + 77]


def bytes_moved(client: StoreClient) -> int:
    return sum(path["read_bytes"] for path in client.stats()["engine"]["paths"].values())


def test_master_and_client_agree_how_large_an_extent_is() -> None:
    for size in [*SIZES, 1 << 30, (1 << 40) + 1]:
        assert extent_bytes(size) == HEADER_BYTES + size + int(table_bytes(np.array([size]))[0])


def test_leaves_cover_their_payloads() -> None:
    leaves = leaves_of(np.array(SIZES))
    for number, size in enumerate(SIZES):
        which = leaves.of(np.array([number]))
        assert (leaves.owners[which] == number).all()
        assert leaves.starts[which].tolist() == list(range(0, size, LEAF))
        assert leaves.lengths[which].sum() == size
    assert leaves.of(np.array([4, 0])).tolist() == [4, 5, 0]
    assert leaves.all_of_each(np.arange(len(leaves.owners)) != 4).tolist() == [True] * 4 + [False] + [True] * 2


@pytest.mark.parametrize("destination", ["bytes", "buffers", "registered"])
@pytest.mark.parametrize("source", ["buffers", "registered"])
def test_ranges_at_every_edge(client: StoreClient, namespace: str, source: str, destination: str) -> None:
    chance = random.Random(7)
    hashes = keys(len(SIZES), namespace)
    values = [content(hash_, size) for hash_, size in zip(hashes, SIZES, strict=True)]
    put_all(client, namespace, hashes, values, source)
    wanted: list[tuple[int, int, int]] = []
    for number, size in enumerate(SIZES):
        edges = sorted({0, 1, size - 1, size, *(e + d for e in range(0, size, LEAF) for d in (-1, 0, 1, 8))})
        edges = [edge for edge in edges if 0 <= edge <= size]
        pairs = [(a, b) for a in edges for b in edges if a < b]
        wanted += [(number, a, b) for a, b in chance.sample(pairs, min(12, len(pairs)))]
    names = [hashes[number] for number, _, _ in wanted]
    starts, sizes = np.array([a for _, a, _ in wanted]), np.array([b - a for _, a, b in wanted])
    if destination == "bytes":
        found = client.get(namespace, names, ranges=(starts, sizes))
        got = list(found)
    elif destination == "buffers":
        buffers = [bytearray(b - a) for _, a, b in wanted]
        found = client.get_into(namespace, names, buffers, ranges=(starts, sizes))
        got = [bytes(one) for one in buffers]
    else:
        region = client.allocate(int(sizes.sum()) + 1)
        offsets = np.cumsum(sizes) - sizes + 1  # at odd places
        found = client.get_into(namespace, names, (region, offsets, sizes), ranges=(starts, sizes))
        got = [bytes(region)[at : at + size] for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    found.require()
    assert found.lengths == sizes.tolist()
    assert got == [values[number][a:b] for number, a, b in wanted]


def put_all(client: StoreClient, namespace: str, hashes: list[bytes], values: list[bytes], source: str) -> None:
    if source == "buffers":
        client.put(namespace, hashes, values).require()
        return
    lengths = np.array([len(value) for value in values])
    offsets = np.cumsum(lengths) - lengths
    region = client.allocate(int(lengths.sum()))
    memoryview(region).cast("B")[:] = b"".join(values)
    client.put(namespace, hashes, (region, offsets, lengths)).require()


def test_a_range_costs_the_leaves_that_it_touches(client: StoreClient, namespace: str) -> None:
    hash_ = key(namespace)
    value = content(hash_, 16 * LEAF)
    client.put(namespace, [hash_], [value]).require()
    before = bytes_moved(client)
    found = client.get(namespace, [hash_] * 2, ranges=([3 * LEAF - 10, 0], [20, LEAF]))
    assert list(found) == [value[3 * LEAF - 10 : 3 * LEAF + 10], value[:LEAF]]
    assert bytes_moved(client) - before == 3 * LEAF + 2 * (HEADER_BYTES + 16 * 8)


def test_whole_leaves_go_straight_into_registered_memory(client: StoreClient, namespace: str) -> None:
    size = 5 * LEAF + 123
    hashes = keys(2, namespace)
    values = [content(hash_, size) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    region = client.allocate(8 * LEAF)
    starts, sizes = np.array([LEAF, 4 * LEAF, 0]), np.array([2 * LEAF, LEAF + 123, LEAF])
    offsets, names = np.array([0, 2 * LEAF + 1, 4 * LEAF]), [hashes[0], hashes[1], hashes[1]]
    staging = client._core.staging
    held = staging.take(staging.nbytes - 1024, time.monotonic() + 10)
    try:
        found = client.get_into(namespace, names, (region, offsets, sizes), ranges=(starts, sizes))
    finally:
        staging.give_back(held)
    found.require()
    got = bytes(region)
    for name, start, nbytes, offset in zip(names, starts.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        assert got[offset : offset + nbytes] == values[hashes.index(name)][start : start + nbytes]


@pytest.mark.parametrize("transports", ["auto", "tcp"])
def test_damage_is_found_in_leaf_table_and_header(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 * LEAF + 500
    hashes = keys(5)
    values = [content(hash_, size) for hash_ in hashes]
    with local_cluster(nodes=1, dram="32MiB") as cluster:
        secret = cluster.secret.encode()
        with (
            TransferEngine(listen=None, transports=transports, secret=secret, connect_timeout=5.0) as engine,
            cluster.client(engine=engine) as client,
        ):
            client.put("a", hashes, values).require()
            unheard(client, monkeypatch)
            extents = locate(client, "a", hashes)[:, 0]
            spoil(client, extents[0], HEADER_BYTES + LEAF + 5)  # the second leaf
            spoil(client, extents[1], HEADER_BYTES + size + 8)  # what the table says of the second leaf
            spoil(client, extents[2], HEADER_BYTES + size + 3 * 8)  # and of the last one
            spoil(client, extents[3], 24)  # the digest in the header
            region = client.allocate(5 * 100)
            for begin, good in ((0, [0, 4]), (LEAF, [4]), (2 * LEAF - 50, [4]), (3 * LEAF, [0, 4])):
                wanted = [value[begin : begin + 100] for value in values]
                found = client.get("a", hashes, ranges=(begin, 100))
                assert [index for index in range(5) if found[index] == wanted[index]] == good
                assert found.where(Outcome.CORRUPT) == [index for index in range(5) if index not in good]
                found = client.get_into("a", hashes, (region, np.arange(5) * 100, 100), ranges=(begin, 100))
                assert found.where(Outcome.OK) == good
                assert all(bytes(region)[100 * index :][:100] == wanted[index] for index in good)


def test_a_range_is_read_from_the_copy_whose_table_is_good() -> None:
    hash_, size = key(), 5 * LEAF
    value = content(hash_, size)
    with local_cluster(nodes=2, dram="32MiB") as cluster, cluster.client() as client:
        client.put("a", [hash_], [value], replicas=2).require()
        spoil(client, locate(client, "a", [hash_])[0, 0], HEADER_BYTES + size + 2 * 8)
        for _ in range(4):
            assert client.get("a", [hash_], ranges=(2 * LEAF, 64))[0] == value[2 * LEAF : 2 * LEAF + 64]


@pytest.mark.parametrize("registered", [False, True])
def test_bytes_that_no_cpu_has_moved_are_verified_here(monkeypatch: pytest.MonkeyPatch, registered: bool) -> None:
    # As over RDMA: the engine computes no digests.
    hashes, size = keys(4), 3 * LEAF + 500
    values = [content(hash_, size) for hash_ in hashes]
    with local_cluster(nodes=1, dram="32MiB") as cluster, cluster.client() as client:
        target = client._core.segments.target
        monkeypatch.setattr(
            client._core.segments, "target", lambda *where: dataclasses.replace(target(*where), by_cpu=False)
        )
        put_all(client, "a", hashes, values, "registered" if registered else "buffers")
        unheard(client, monkeypatch)
        extents = locate(client, "a", hashes)[:, 0]
        spoil(client, extents[0], HEADER_BYTES + LEAF + 5)
        spoil(client, extents[1], HEADER_BYTES + size + 8)
        assert list(client.get("a", hashes)) == [None, *values[1:]]  # the table is of no use to a whole chunk
        for begin, good in ((0, [0, 2, 3]), (2 * LEAF - 50, [2, 3]), (3 * LEAF, [0, 2, 3])):
            found = client.get("a", hashes, ranges=(begin, 100))
            assert [i for i in range(4) if found[i] == values[i][begin : begin + 100]] == good
            assert found.count(Outcome.CORRUPT) == 4 - len(good)


def test_ranges_of_transfers_that_fail_are_no_bytes(shared_cluster: LocalCluster, namespace: str) -> None:
    hashes = keys(6, namespace)
    values = [content(hash_, 2 * LEAF + 9) for hash_ in hashes]
    with (
        FaultyEngine(Faults(), listen=None, secret=shared_cluster.secret.encode(), connect_timeout=5.0) as engine,
        shared_cluster.client(engine=engine, avoid="1ms") as client,
    ):
        client.put(namespace, hashes, values).require()
        engine.set_faults(Faults(seed=5, corrupt=0.2))
        for round_ in range(6):
            begin = round_ * LEAF // 3
            found = client.get(namespace, hashes, ranges=(begin, 1000))
            for index in found.where(Outcome.OK):
                assert found[index] == values[index][begin : begin + 1000]
