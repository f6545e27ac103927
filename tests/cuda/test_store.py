# SPDX-License-Identifier: Apache-2.0
"""Chunks that lie in memory of a GPU: put from there, and got into it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda_testing.ends import content
from fake_cuda import DeviceMemory, FakeCuda
from store_testing import keys, locate, spoil, unheard

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import ROOT, ChunkConflictError, Outcome, StoreArgumentError, StoreClient
from moonpool.store_client.packing import NO_SEGMENT
from moonpool.transfer_engine import LEAF_BYTES, CudaError, Region, RegionReleasedError

SIZES = [1, 77, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES + 500]
TOTAL = sum(SIZES)
LENGTHS = np.array(SIZES)
OFFSETS = np.cumsum(LENGTHS) - LENGTHS


@pytest.fixture(scope="module")
def cluster(driver: FakeCuda) -> Iterator[LocalCluster]:
    with local_cluster(nodes=2, dram="64MiB") as made:
        yield made


@pytest.fixture(params=["auto", "tcp"])
def client(
    cuda: FakeCuda, cluster: LocalCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreClient]:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", request.param)
    with cluster.client() as made:
        assert made.engine.settings.transports == request.param
        yield made


@pytest.fixture
def memory(cuda: FakeCuda) -> Iterator[DeviceMemory]:
    made = cuda.memory(content(1, TOTAL).tobytes())
    yield made
    cuda.free(made.address)


@pytest.fixture
def region(client: StoreClient, memory: DeviceMemory) -> Region:
    return client.engine.register(memory)


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


def test_chunks_go_from_a_gpu_and_to_it(
    client: StoreClient, cuda: FakeCuda, memory: DeviceMemory, region: Region, namespace: str
) -> None:
    names = keys(len(SIZES), namespace)
    put = client.put(namespace, names, (region, OFFSETS, LENGTHS), parents=ROOT)
    assert put.ok, put.errors
    values = client.get(namespace, names)
    whole = content(1, TOTAL).tobytes()
    assert list(values) == [whole[begin : begin + size] for begin, size in zip(OFFSETS, SIZES, strict=True)]
    cuda.poke(memory.address, bytes(TOTAL))
    assert client.get_into(namespace, names, (region, OFFSETS, LENGTHS)).ok
    assert cuda.peek(memory.address, TOTAL) == whole


def test_chunks_lie_in_pages_of_a_gpu(
    client: StoreClient, cuda: FakeCuda, memory: DeviceMemory, region: Region, namespace: str
) -> None:
    # 100 pages of 4,000 bytes, in any order, 25 for each chunk.
    pages = np.random.default_rng(3).permutation(100)
    places = region, pages * 4000, np.full(100, 4000), np.full(4, 25)
    names = keys(4, namespace)
    put = client.put(namespace, names, places, parents=ROOT)
    assert put.ok, put.errors
    before = content(1, TOTAL)
    joined = before[:400_000].reshape(100, 4000)[pages].tobytes()
    assert b"".join(value or b"" for value in client.get(namespace, names)) == joined
    cuda.poke(memory.address, bytes(TOTAL))
    assert client.get_into(namespace, names, places).ok
    assert cuda.peek(memory.address, 400_000) == before[:400_000].tobytes()
    assert cuda.peek(memory.address + 400_000, TOTAL - 400_000) == bytes(TOTAL - 400_000)


def test_parts_of_chunks_come_to_a_gpu(
    client: StoreClient, cuda: FakeCuda, memory: DeviceMemory, region: Region, namespace: str
) -> None:
    names = keys(1, namespace)
    value = content(5, 3 * LEAF_BYTES + 500).tobytes()
    assert client.put(namespace, names, [value], parents=ROOT).ok
    start, size = LEAF_BYTES - 10, 1000
    got = client.get_into(namespace, names, (region, 100, size), ranges=(start, size))
    assert got.ok, got.errors
    assert cuda.peek(memory.address, 100) == content(1, TOTAL)[:100].tobytes()
    assert cuda.peek(memory.address + 100, size) == value[start : start + size]


def test_what_is_there_already_is_compared(
    client: StoreClient, cuda: FakeCuda, memory: DeviceMemory, region: Region, namespace: str
) -> None:
    names = keys(1, namespace)
    assert client.put(namespace, names, (region, 0, 5000), parents=ROOT).ok
    again = client.put(namespace, names, (region, 0, 5000), parents=ROOT, verify=True)
    assert list(again.outcomes) == [Outcome.ALREADY]
    cuda.poke(memory.address, bytes(10))
    other = client.put(namespace, names, (region, 0, 5000), parents=ROOT, verify=True)
    assert isinstance(other.errors[0], ChunkConflictError)


def test_spoilt_bytes_are_no_hit(
    client: StoreClient, region: Region, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(1, namespace)
    assert client.put(namespace, names, (region, 0, 300_000), parents=ROOT).ok
    unheard(client, monkeypatch)
    for extent in locate(client, namespace, names)[0]:
        if extent["segment"] != NO_SEGMENT:
            spoil(client, extent, 64 + 1000)
    got = client.get_into(namespace, names, (region, 0, 300_000))
    assert list(got.outcomes) == [Outcome.CORRUPT]


def test_a_region_of_a_gpu_is_no_buffer(client: StoreClient, region: Region, namespace: str) -> None:
    for call in (client.put, client.get_into):
        with pytest.raises(StoreArgumentError, match=r"memory of a GPU"):
            call(namespace, keys(1), [region])


def calls_with(client: StoreClient, region: Region, namespace: str) -> list[Callable[[], object]]:
    spans = OFFSETS, LENGTHS
    return [
        lambda: client.put(namespace, keys(len(SIZES)), (region, *spans), timeout=10.0),
        lambda: client.get_into(namespace, keys(len(SIZES), "there"), (region, *spans), timeout=10.0),
        lambda: client.put(namespace, keys(1), (region, *spans, len(SIZES)), timeout=10.0),
    ]


@pytest.mark.parametrize("fault", ["freed", "context"])
def test_what_is_wrong_with_ones_own_gpu_is_said_and_no_node_is_blamed(
    client: StoreClient, cuda: FakeCuda, namespace: str, fault: str
) -> None:
    there = [bytes(size) for size in SIZES]
    client.put(namespace, keys(len(SIZES), "there"), there).require()
    memory = cuda.memory(content(1, TOTAL).tobytes())
    region = client.engine.register(memory)
    if fault == "freed":
        cuda.free(memory.address)
    else:
        cuda.kill_context(0, 700)
    began = time.monotonic()
    try:
        for call in calls_with(client, region, namespace):
            with pytest.raises(RegionReleasedError if fault == "freed" else CudaError):
                call()
            assert (client.stats()["segment_failures"], client.stats()["segments_avoided"]) == (0, [])
        client.put(namespace, keys(1, "host"), [b"host"]).require()
    finally:
        cuda.kill_context(0, 0)
    assert time.monotonic() - began < 5
    region.release()
    if fault == "context":
        cuda.free(memory.address)
