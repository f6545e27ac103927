# SPDX-License-Identifier: Apache-2.0
"""A worker whose paged cache is memory of a GPU."""

from __future__ import annotations

import time
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from store_testing import keys
from worker_testing import ArrayTensor, Cache
from worker_testing.rig import CHUNK_BLOCKS, Rig

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.connector import ordering
from moonpool.store_client import StoreClient


class _Device(types.SimpleNamespace):
    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class _DeviceTensor(ArrayTensor):
    """A tensor whose bytes are a GPU's. The array only says where in them it lies."""

    def __init__(self, cache: GpuCache, layer: int) -> None:
        super().__init__(cache.array(layer), cache.storage)
        self.device = _Device(type="cuda", index=0)
        self._base = cache.address
        self._offset = super().data_ptr() - int(cache.storage.__array_interface__["data"][0])

    def data_ptr(self) -> int:
        return self._base + self._offset

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(data_ptr=lambda: self._base, nbytes=lambda: self._storage.nbytes)


class GpuCache(Cache):
    """A cache whose `storage` is a copy of what the GPU has: `pull` brings it up to date."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(blocks=64, heads=2, tokens=16, content=64, with_torch=False)
        self.cuda = cuda
        self.address = cuda.alloc(self.storage.nbytes)
        cuda.poke(self.address, self.storage.tobytes())

    def fill(self, seed: int) -> Cache:
        super().fill(seed)
        self.cuda.poke(self.address, self.storage.tobytes())
        return self

    def views(self) -> dict[str, Any]:
        return {f"model.layers.{layer}.attn": _DeviceTensor(self, layer) for layer in range(self.layers)}

    def pull(self) -> None:
        self.storage[:] = np.frombuffer(self.cuda.peek(self.address, self.storage.nbytes), np.uint8)


class Stream:
    """Stands for the stream that torch has for a step."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.handle = cuda.stream()
        self.events: list[int] = []

    def record(self, device: Any) -> Any:
        assert str(device) == "cuda:0"
        event = self.cuda.event()
        self.events.append(event)
        self.cuda.call("cuEventRecord", event, self.handle)
        return types.SimpleNamespace(query=lambda: self.cuda.code("cuEventQuery", event) == 0)

    def close(self) -> None:
        for event in self.events:
            self.cuda.call("cuEventDestroy_v2", event)
        self.cuda.call("cuStreamDestroy_v2", self.handle)


@pytest.fixture(scope="module")
def cluster(driver: FakeCuda) -> Iterator[LocalCluster]:
    with local_cluster(nodes=1, dram="64MiB") as made:
        yield made


@pytest.fixture
def stream(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream(cuda)
    monkeypatch.setattr(ordering, "_record", made.record)
    yield made
    made.close()


@pytest.fixture
def rigs(cuda: FakeCuda, cluster: LocalCluster, stream: Stream) -> Iterator[Callable[..., Rig]]:
    namespace = uuid.uuid4().hex
    with ExitStack() as stack:

        def make(**options: Any) -> Rig:
            cache = GpuCache(cuda)
            stack.callback(cuda.free, cache.address)
            rig = Rig(cluster, namespace, cache=cache, **options)
            stack.callback(rig.close)
            return rig

        yield make


def test_what_one_worker_saves_another_one_loads(rigs: Callable[..., Rig]) -> None:
    writer, reader = rigs(), rigs()
    hashes = writer.put(10)
    # The first block of the first chunk is there already: that chunk is copied from staging.
    load = reader.load(hashes, range(63, 44, -1), begin_block=1)
    reader.loaded()
    assert load.good == 10
    assert isinstance(reader.cache, GpuCache)
    reader.cache.pull()
    blocks = [*range(63, 44, -1)]
    assert reader.cache.chunk(blocks[:1]) == writer.cache.chunk([1])
    for number in range(1, 10):
        place = 2 * number - 1
        assert reader.cache.chunk(blocks[place : place + 2]) == writer.cache.chunk([2 * number, 2 * number + 1])
    assert not reader.cache.storage.reshape(3, 64, -1)[:, :45].any()


def test_what_the_step_computes_is_saved(rigs: Callable[..., Rig], cuda: FakeCuda, stream: Stream) -> None:
    rig = rigs()
    cache = rig.cache
    assert isinstance(cache, GpuCache)
    cache.fill(1)
    (name,) = keys(1, "step")
    with cuda.held():
        # The step is queued, and not computed yet.
        cuda.call("cuMemsetD8Async", cache.address, 7, cache.storage.nbytes, stream.handle)
        rig.save([name], range(CHUNK_BLOCKS))
        time.sleep(0.1)
        assert not rig.saves.ended()
    assert all(save.saved for save in rig.saved().values())
    client = rig.link.client
    assert isinstance(client, StoreClient)
    value = client.get(rig.saves._pool.namespace, [name])[0]
    assert value is not None
    assert set(value[: rig.paged.chunk_bytes - 32]) == {7}


def test_what_the_step_reads_is_not_overwritten(rigs: Callable[..., Rig], cuda: FakeCuda, stream: Stream) -> None:
    rig = rigs()
    cache = rig.cache
    assert isinstance(cache, GpuCache)
    hashes = rig.put(2)
    cache.fill(5)
    with cuda.held():
        cuda.call("cuMemsetD8Async", cache.address, 7, 16, stream.handle)
        rig.load(hashes, range(40, 44))
        late = rig.load(hashes, range(50, 54), timeout=0.3)
        (ended,) = rig.loaded().values()
        assert (ended, late.good, late.reason) == (late, 0, "late")
        before = cache.storage.copy()
        cache.pull()
        assert (cache.storage == before).all()
    (load,) = rig.loaded().values()
    assert load.good == 2
