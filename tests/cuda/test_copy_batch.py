# SPDX-License-Identifier: Apache-2.0
"""copy_batch between memory of GPUs and of the host: scattered pieces of a paged cache to chunks, and back."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from engine_testing.patterns import pattern
from fake_cuda import FakeCuda

from moonpool.transfer_engine import (
    CudaError,
    MoonpoolError,
    OutOfRangeError,
    RegionReadOnlyError,
    RegionReleasedError,
    copy_batch,
)

from .conftest import OpenEngine

SIZE = 3 * (1 << 20)
COPIES = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuLaunchKernel")


def blocks(count: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Return where the pieces are in a cache, in any order, and in a chunk."""
    return np.random.default_rng(1).permutation(SIZE // nbytes)[:count] * nbytes, np.arange(count) * nbytes


def copy_calls(cuda: FakeCuda) -> int:
    return sum(cuda.calls(name) for name in COPIES)


@pytest.mark.parametrize(("count", "nbytes"), [(1, 4096), (90, 16 << 10), (40, 1000), (5, 400_000), (2, 1 << 20)])
def test_pieces_go_to_a_chunk_and_back(cuda: FakeCuda, open_cuda_engine: OpenEngine, count: int, nbytes: int) -> None:
    engine = open_cuda_engine()
    source = pattern(SIZE, 1)
    cache, chunk = engine.register(cuda.memory(source)), engine.register(cuda.memory(bytes(SIZE)))
    in_cache, in_chunk = blocks(count, nbytes)
    cuda.forget_calls()
    copy_batch(chunk, in_chunk, cache, in_cache, nbytes)
    assert copy_calls(cuda) == 1
    gathered = b"".join(source[at : at + nbytes] for at in in_cache.tolist())
    assert cuda.peek(chunk.address, SIZE) == gathered + bytes(SIZE - len(gathered))
    other = pattern(SIZE, 2)
    cuda.poke(chunk.address, other)
    copy_batch(cache, in_cache, chunk, in_chunk, nbytes)
    expected = bytearray(source)
    for at, begin in zip(in_cache.tolist(), in_chunk.tolist(), strict=True):
        expected[at : at + nbytes] = other[begin : begin + nbytes]
    assert cuda.peek(cache.address, SIZE) == bytes(expected)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(("count", "nbytes"), [(150, 16 << 10), (999, 1000), (2, (1 << 20) + 11)])
def test_pieces_go_to_the_host_and_back(
    cuda: FakeCuda, open_cuda_engine: OpenEngine, count: int, nbytes: int, pinned: bool
) -> None:
    engine = open_cuda_engine()
    source, host = pattern(SIZE, 3), bytearray(SIZE)
    cache = engine.register(cuda.memory(source))
    in_cache, in_host = blocks(count, nbytes)
    at_host = ctypes.addressof(ctypes.c_char.from_buffer(host))
    if pinned:
        cuda.call("cuMemHostRegister_v2", at_host, SIZE, 0)
    cuda.forget_calls()
    copy_batch(host, in_host, cache, in_cache, nbytes)
    gathered = b"".join(source[at : at + nbytes] for at in in_cache.tolist())
    assert bytes(host) == gathered + bytes(SIZE - len(gathered))
    # One for each MiB of pinned memory that it passes through.
    assert copy_calls(cuda) == 1 if pinned else copy_calls(cuda) <= 4
    assert cuda.calls("pageable copies") == 0
    host[:] = pattern(SIZE, 4)
    copy_batch(cache, in_cache, host, in_host, nbytes)
    expected = bytearray(source)
    for at, begin in zip(in_cache.tolist(), in_host.tolist(), strict=True):
        expected[at : at + nbytes] = host[begin : begin + nbytes]
    assert cuda.peek(cache.address, SIZE) == bytes(expected)
    if pinned:
        cuda.call("cuMemHostUnregister", at_host)


def test_much_more_than_the_pinned_memory_goes_through_it(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine = open_cuda_engine(cuda_staging_bytes=4 << 20)
    source = pattern(9 << 20, 5)
    gpu = engine.register(cuda.memory(source))
    host = bytearray(len(source))
    copy_batch(host, 0, gpu, 0, len(source))
    assert bytes(host) == source
    host[:] = pattern(len(host), 6)
    copy_batch(gpu, 0, host, 0, len(host))
    assert cuda.peek(gpu.address, len(host)) == bytes(host)


def test_another_device_is_reached_by_copies(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine = open_cuda_engine()
    first = engine.register(cuda.memory(pattern(SIZE, 7)))
    cuda.start(1)
    second = engine.register(cuda.memory(bytes(SIZE), device=1))
    cuda.forget_calls()
    copy_batch(second, [0, 64], first, [128, 0], 32)
    assert cuda.calls("cuLaunchKernel") == 0
    expected = pattern(SIZE, 7)
    assert cuda.peek(second.address, 96) == expected[128:160] + bytes(32) + expected[:32]
    second.release()
    engine.close()
    cuda.stop(1)
    cuda.start(0)
    cuda.call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(0))


def test_what_cannot_be_copied_is_said(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine = open_cuda_engine()
    memory = cuda.memory(bytes(100))
    gpu, only_read = engine.register(memory), engine.register(cuda.memory(bytes(100)), writable=False)
    host = bytearray(100)
    for offsets in ([0, 90], [0, -1]):
        with pytest.raises(OutOfRangeError, match="item 1 is not inside"):
            copy_batch(gpu, offsets, host, 0, 20)
    with pytest.raises(RegionReadOnlyError):
        copy_batch(only_read, 0, host, 0, 1)
    copy_batch(host, 0, only_read, 0, 100)
    cuda.set("fail=cuMemcpyAsync:1:2")
    with pytest.raises(MoonpoolError, match="OUT_OF_MEMORY"):
        copy_batch(gpu, 0, only_read, 0, 100)
    copy_batch(gpu, 0, only_read, 0, 0)
    cuda.free(memory.address)
    with pytest.raises(RegionReleasedError, match="freed"):
        copy_batch(gpu, 0, host, 0, 1)
    gpu.release()
    with pytest.raises(RegionReleasedError):
        copy_batch(gpu, 0, host, 0, 1)


def test_a_gpu_that_makes_no_progress_is_not_waited_for(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine = open_cuda_engine(progress_timeout=0.2)
    one, two = (engine.register(cuda.memory(bytes(64))) for _ in range(2))
    with cuda.held():
        with pytest.raises(TimeoutError, match="no progress"):
            copy_batch(one, 0, two, 0, 64)
        # It may still write there.
        with pytest.raises(MoonpoolError) as caught:
            one.release()
        assert caught.value.code == "REGION_BUSY"


@pytest.mark.parametrize("count", [1, 64])
def test_a_copy_without_an_event_to_go_by_is_an_error_and_has_ended(
    cuda: FakeCuda, open_cuda_engine: OpenEngine, count: int
) -> None:
    engine = open_cuda_engine()
    one, two = (engine.register(cuda.memory(pattern(SIZE, seed))) for seed in (1, 2))
    in_cache, in_chunk = blocks(count, 1024)
    cuda.set("delay_us=50000;fail=cuEventRecord:1:400")
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        copy_batch(one, in_chunk, two, in_cache, 1024)
    seen = cuda.peek(one.address, SIZE)
    one.release()
    cuda.set("delay_us=0")
    copy_batch(two, 0, two, 1024, 1024)
    # Nothing came later than the error.
    assert cuda.peek(one.address, SIZE) == seen


def test_a_dead_context_fails_what_uses_it(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine = open_cuda_engine()
    one, two = (engine.register(cuda.memory(bytes(64))) for _ in range(2))
    cuda.set("fail=execute:1:700")
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        copy_batch(one, 0, two, 0, 64)
    # The engine lives on.
    host = engine.register(bytearray(64))
    assert bytes(host) == bytes(64)


def test_pinned_memory_that_makes_no_progress_is_not_waited_for(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine = open_cuda_engine(progress_timeout=2.0, cuda_staging_bytes=16 << 20)
    gpu, host = engine.register(cuda.memory(bytes(6 << 20))), bytearray(6 << 20)
    # So that there is pinned memory already.
    copy_batch(host, 0, gpu, 0, 1)
    with cuda.held():
        for target, source in ((gpu, host), (host, gpu)):
            with pytest.raises(TimeoutError, match="no progress"):
                copy_batch(target, 0, source, 0, len(host))
        with pytest.raises(MoonpoolError) as caught:
            gpu.release()
        assert caught.value.code == "REGION_BUSY"
    # And it goes on.
    copy_batch(host, 0, gpu, 0, len(host))


def test_copies_that_were_late_and_end_while_the_engine_closes_leave_nothing(
    cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine = open_cuda_engine(progress_timeout=1.0, cuda_staging_bytes=16 << 20)
    gpu, host = engine.register(cuda.memory(bytes(6 << 20))), bytearray(6 << 20)
    # So that there is pinned memory already.
    copy_batch(host, 0, gpu, 0, 1)
    with cuda.held(), pytest.raises(TimeoutError, match="no progress"):
        copy_batch(gpu, 0, host, 0, len(host))
    cuda.set("delay_us=20000")
    engine.close()
    # What the fixture looks at.
    assert cuda.alive("pinned") == 0


@pytest.mark.parametrize("to_gpu", [True, False])
def test_a_region_can_be_released_at_once(cuda: FakeCuda, open_cuda_engine: OpenEngine, to_gpu: bool) -> None:
    engine = open_cuda_engine()
    memory, host = cuda.memory(bytes(SIZE)), bytearray(SIZE)
    for _ in range(200):
        region = engine.register(memory)
        copy_batch(*((region, 0, host, 0) if to_gpu else (host, 0, region, 0)), 100)
        region.release()
    cuda.free(memory.address)
