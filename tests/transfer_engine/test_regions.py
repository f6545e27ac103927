# SPDX-License-Identifier: Apache-2.0
"""Memory of an engine: where it may come from, who keeps it alive, and when it goes."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.patterns import fill, pattern

from moonpool.transfer_engine import (
    ArgumentTypeError,
    InvalidArgumentError,
    LimitError,
    OutOfMemoryError,
    OutOfRangeError,
    Region,
    RegionReadOnlyError,
    RegionReleasedError,
    TransferEngine,
)


@pytest.fixture
def engine(open_engine: OpenEngine) -> TransferEngine:
    return open_engine()


# -------------------------------------------------------------------- allocated


def test_allocated_memory_is_zeroed_page_aligned_and_writable(engine: TransferEngine) -> None:
    region = engine.allocate(10_000, name="kv")
    assert (region.nbytes, region.name, region.writable, region.allocated, region.released) == (
        10_000, "kv", True, True, False,
    )  # fmt: skip
    assert region.address % mmap.PAGESIZE == 0
    assert bytes(region) == bytes(10_000)
    memoryview(region)[9_999] = 7
    assert bytes(region)[-1] == 7
    assert repr(region) == f"<Region 'kv' 10000 bytes at {region.address:#x}, allocated>"


def test_keys_are_random_and_ids_differ(engine: TransferEngine) -> None:
    regions = [engine.allocate(64) for _ in range(50)]
    assert len({region.key for region in regions}) == 50
    assert len({region.id for region in regions}) == 50
    # 50 random 64-bit numbers do not all lie in the lower half.
    assert max(region.key for region in regions) > 1 << 62


def test_numpy_and_torch_share_its_bytes(engine: TransferEngine) -> None:
    region = engine.allocate(4096)
    numbers = np.frombuffer(region, dtype=np.float32)
    numbers[:] = 1.5
    assert np.frombuffer(bytes(region), dtype=np.float32)[1023] == 1.5
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.frombuffer(region, dtype=torch.float32)
    tensor[0] = 2.5
    assert numbers[0] == 2.5


def test_a_view_keeps_the_memory_of_a_closed_engine(open_engine: OpenEngine) -> None:
    engine = open_engine()
    region = engine.allocate(1 << 20)
    fill(region)
    numbers = np.frombuffer(region, dtype=np.uint8)
    view = memoryview(region)
    engine.close()
    del engine, region
    gc.collect()
    assert numbers.tobytes() == bytes(view) == pattern(1 << 20)
    numbers[0] ^= 0xFF


def test_a_view_keeps_the_memory_of_a_released_region(engine: TransferEngine) -> None:
    region = engine.allocate(1 << 16)
    fill(region)
    view = memoryview(region)
    region.release()
    assert bytes(view) == pattern(1 << 16)
    with pytest.raises(RegionReleasedError, match="released"):
        memoryview(region)


def mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:  # noqa: PTH123 - not a file to handle as a path
        return any(
            int(low, 16) <= address < int(high, 16)
            for low, high in (line.split(maxsplit=1)[0].split("-") for line in maps)
        )


def test_release_gives_the_memory_back_although_the_handle_lives(engine: TransferEngine) -> None:
    region = engine.allocate(256 << 20)
    assert mapped(region.address + (128 << 20))
    region.release()
    assert region.released
    assert not mapped(region.address + (128 << 20))


def test_the_engine_keeps_regions_that_the_caller_dropped(open_pair: Any) -> None:
    pair = open_pair("tcp")
    fill(pair.server.allocate(4096, name="dropped"))
    gc.collect()
    remote = pair.peer.regions.wait("dropped", 90.0)
    pair.client.read(pair.peer, pair.local, remote, 0, 0, 4096).wait()
    assert bytes(memoryview(pair.local)[:4096]) == pattern(4096)


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 64, -(1 << 80)])
def test_an_impossible_length_is_refused(engine: TransferEngine, nbytes: int) -> None:
    with pytest.raises(OutOfRangeError) as caught:
        engine.allocate(nbytes)
    assert caught.value.hint


@pytest.mark.parametrize("nbytes", [1.5, "4096", None, True, b"1"])
def test_a_length_of_a_wrong_type_is_refused(engine: TransferEngine, nbytes: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="nbytes"):
        engine.allocate(nbytes)


def test_more_memory_than_there_is(engine: TransferEngine) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        engine.allocate(1 << 60)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.hint


@pytest.mark.parametrize("name", [7, b"kv", ["kv"]])
def test_a_name_of_a_wrong_type_is_refused(engine: TransferEngine, name: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="name"):
        engine.allocate(64, name=name)


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "a\0b"])
def test_an_impossible_name_is_refused(engine: TransferEngine, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        engine.allocate(64, name=name)


def test_names_are_unique_among_live_regions(engine: TransferEngine) -> None:
    first = engine.allocate(64, name="x" * 255)
    with pytest.raises(InvalidArgumentError) as caught:
        engine.allocate(64, name="x" * 255)
    assert caught.value.hint
    first.release()
    engine.allocate(64, name="x" * 255)


def test_the_number_of_regions_is_bounded(open_engine: OpenEngine) -> None:
    engine = open_engine(regions_max=3)
    regions = [engine.allocate(64, name=str(index)) for index in range(3)]
    with pytest.raises(LimitError, match="regions_max"):
        engine.allocate(64, name="3")
    regions[0].release()
    engine.allocate(64, name="3")


def test_a_region_cannot_be_made_directly() -> None:
    with pytest.raises(TypeError, match="allocate"):
        Region()


# -------------------------------------------------------------------- registered


def numpy_structured() -> Any:
    return np.zeros(16, dtype=[("a", "<i4"), ("b", "<f8")])


SOURCES = {
    "bytearray": lambda: bytearray(4096),
    "memoryview": lambda: memoryview(bytearray(4096))[1024:],
    "array": lambda: array.array("d", [0.0] * 512),
    "ctypes": ctypes.c_uint8 * 4096,
    "mmap": lambda: mmap.mmap(-1, 4096),
    "numpy": lambda: np.zeros(4096, dtype=np.uint8),
    "numpy 2-d": lambda: np.zeros((32, 32), dtype=np.float32),
    "numpy Fortran order": lambda: np.zeros((32, 32), dtype=np.float32, order="F"),
    "numpy structured": numpy_structured,
    "numpy datetime, by its __array_interface__": lambda: np.zeros(16, dtype="datetime64[ns]"),
    "numpy slice": lambda: np.zeros((64, 64))[8:16],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_anything_contiguous_can_be_registered(open_pair: Any, kind: str) -> None:
    pair: Pair = open_pair("tcp")
    fill(pair.region)
    source = SOURCES[kind]()
    region = pair.client.register(source)
    raw = np.frombuffer(region, dtype=np.uint8)
    assert (region.nbytes, region.allocated) == (raw.nbytes, False)
    pair.client.read(pair.peer, region, pair.remote, 0, 0, region.nbytes).wait()
    assert raw.tobytes() == pattern(region.nbytes)
    # The source itself holds the bytes, not a copy.
    seen = source.tobytes(order="A") if isinstance(source, np.ndarray) else bytes(memoryview(source).cast("B"))
    assert seen == pattern(region.nbytes)
    del raw
    region.release()


class WithArrayInterface:
    """The least that numpy's protocol asks for."""

    def __init__(self, memory: np.ndarray, **changes: Any) -> None:
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, **changes}


def test_an_object_with_only_an_array_interface(engine: TransferEngine) -> None:
    memory = np.zeros((4, 8), dtype=np.int16)
    region = engine.register(WithArrayInterface(memory))
    assert (region.address, region.nbytes) == (memory.ctypes.data, 64)
    assert engine.register(WithArrayInterface(memory, strides=(16, 2))).nbytes == 64
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        engine.register(WithArrayInterface(memory, strides=(2, 8)))
    with pytest.raises(RegionReadOnlyError):
        engine.register(WithArrayInterface(memory, data=(memory.ctypes.data, True)))
    with pytest.raises(ArgumentTypeError, match="no address"):
        engine.register(WithArrayInterface(memory, data=None))


def test_torch_tensors(engine: TransferEngine) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for tensor in (torch.zeros(16, 16), torch.zeros(64, dtype=torch.bfloat16), torch.zeros(8, requires_grad=True)):
        region = engine.register(tensor)
        assert (region.address, region.nbytes) == (tensor.data_ptr(), tensor.numel() * tensor.element_size())
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        engine.register(torch.zeros(16, 16).t())
    with pytest.raises(InvalidArgumentError, match="empty"):
        engine.register(torch.zeros(0))
    with pytest.raises(InvalidArgumentError, match="layout"):
        engine.register(torch.zeros(4, 4).to_sparse())
    with pytest.raises(ArgumentTypeError, match="device meta"):
        engine.register(torch.zeros(4, device="meta"))


def test_memory_by_address(engine: TransferEngine) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    region = engine.register((memory.ctypes.data, 4096), name="raw")
    assert (region.address, region.nbytes, region.name) == (memory.ctypes.data, 4096, "raw")
    memoryview(region)[0] = 9
    assert memory[0] == 9


@pytest.mark.parametrize("source", [(0, 64), (-8, 64), (4096, -1), (1 << 64, 1), ((1 << 64) - 1, 2)])
def test_an_impossible_address_is_refused(engine: TransferEngine, source: tuple[int, int]) -> None:
    with pytest.raises(OutOfRangeError):
        engine.register(source)


@pytest.mark.parametrize("source", [(), (4096,), (4096, 1, "cuda:0", 2), ("a", 1), (4096.0, 1), (True, True)])
def test_a_tuple_that_is_no_address_and_length(engine: TransferEngine, source: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"\(address, nbytes\)"):
        engine.register(source)


@pytest.mark.parametrize("source", [None, 7, "text", object(), [1, 2], {"a": 1}])
def test_what_has_no_memory_is_refused(engine: TransferEngine, source: Any) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        engine.register(source)
    assert "buffer protocol" in caught.value.hint


def test_read_only_memory_needs_writable_false(open_pair: Any) -> None:
    pair: Pair = open_pair("tcp")
    data = pattern(4096)
    with pytest.raises(RegionReadOnlyError) as caught:
        pair.server.register(data, name="constant")
    assert "writable=False" in caught.value.hint
    frozen = np.frombuffer(data, dtype=np.uint8)
    with pytest.raises(RegionReadOnlyError):
        pair.server.register(frozen)
    region = pair.server.register(data, name="constant", writable=False)
    assert not region.writable
    assert memoryview(region).readonly
    assert "read-only" in repr(region)
    remote = pair.peer.regions.wait("constant", 90.0)
    assert not remote.writable
    pair.client.read(pair.peer, pair.local, remote, 0, 0, 4096).wait()
    assert bytes(memoryview(pair.local)[:4096]) == data


@pytest.mark.parametrize(
    "source", [lambda: np.zeros((8, 8))[:, ::2], lambda: np.zeros(64)[::-1], lambda: memoryview(bytearray(64))[::2]]
)
def test_memory_with_holes_is_refused(engine: TransferEngine, source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        engine.register(source())


@pytest.mark.parametrize(
    "source", [bytearray(), np.zeros(0), np.zeros((4, 0)), (4096, 0), memoryview(bytearray(8))[8:]]
)
def test_empty_memory_is_refused(engine: TransferEngine, source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="empty"):
        engine.register(source)


def test_registered_memory_cannot_be_resized_until_it_is_released(engine: TransferEngine) -> None:
    memory = bytearray(64)
    region = engine.register(memory)
    with pytest.raises(BufferError):
        memory.append(0)
    region.release()
    memory.append(0)


def test_a_view_holds_registered_memory_after_the_release(engine: TransferEngine) -> None:
    memory = bytearray(64)
    region = engine.register(memory)
    view = memoryview(region)
    region.release()
    with pytest.raises(BufferError):
        memory.append(0)
    view.release()
    memory.append(0)


@pytest.mark.parametrize("end", ["release", "close"])
def test_the_registered_object_lives_until_release_or_close(open_engine: OpenEngine, end: str) -> None:
    engine = open_engine()
    memory = np.zeros(64)
    gone = weakref.ref(memory)
    region = engine.register(memory)
    tensor_like = WithArrayInterface(np.zeros(64))
    tensor_gone = weakref.ref(tensor_like)
    other = engine.register(tensor_like)
    del memory, tensor_like
    gc.collect()
    assert gone() is not None
    assert tensor_gone() is not None
    if end == "release":
        region.release()
        other.release()
    else:
        engine.close()
    gc.collect()
    assert gone() is None
    assert tensor_gone() is None


def test_one_object_may_be_registered_twice(engine: TransferEngine) -> None:
    memory = bytearray(64)
    first, second = engine.register(memory), engine.register(memory)
    assert first.address == second.address
    assert first.key != second.key
    first.release()
    assert not second.released


def test_releasing_twice_does_nothing(engine: TransferEngine) -> None:
    region = engine.allocate(64)
    region.release()
    region.release()
    assert "released" in repr(region)


def test_a_released_region_is_refused_as_the_local_side(pair: Pair) -> None:
    pair.local.release()
    with pytest.raises(RegionReleasedError):
        pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 64)


def test_a_released_region_disappears_from_the_peers_view(pair: Pair) -> None:
    pair.region.release()
    with pytest.raises(RegionReleasedError):
        pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 64).wait()


def test_hundred_thousand_regions(open_pair: Any) -> None:
    pair: Pair = open_pair("tcp")
    memory = np.zeros(100_000 * 16, dtype=np.uint8)
    base = memory.ctypes.data
    for index in range(100_000):
        pair.server.register((base + 16 * index, 16), name=f"block-{index}")
    last = pair.peer.regions.wait("block-99999", 90.0)
    fill(memory)
    pair.client.read(pair.peer, pair.local, last, 0, 0, 16).wait()
    assert bytes(memoryview(pair.local)[:16]) == memory[-16:].tobytes()
    assert len(pair.peer.regions) == 100_001
    late = pair.client.connect(pair.server.address or "", timeout=90.0)
    assert len(late.regions) == 100_001
