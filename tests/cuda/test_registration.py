# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU as a region: what it may come from, and claims that are not true."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_testing.contexts import current
from cuda_testing.dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DlpackArray
from cuda_testing.ends import OpenEngine
from cuda_testing.virtual import VirtualMemory
from fake_cuda import FakeCuda, environment, library

from moonpool.transfer_engine import (
    ArgumentTypeError,
    CudaError,
    InvalidArgumentError,
    OutOfRangeError,
    Region,
    TransferEngine,
)

SIZE = 300_000


@pytest.fixture
def engine(open_cuda_engine: OpenEngine) -> TransferEngine:
    return open_cuda_engine()


@pytest.fixture
def address(cuda: FakeCuda) -> Any:
    address = cuda.alloc(SIZE)
    yield address
    cuda.free(address)


def test_every_way_to_name_memory_of_a_gpu(cuda: FakeCuda, engine: TransferEngine, address: int) -> None:
    class Tensor:  # the parts of torch.Tensor that are looked at
        def __init__(self) -> None:
            self.device = type("device", (), {"type": "cuda", "index": 0})
            self.layout = "torch.strided"
            self.is_cuda = True

        def is_contiguous(self) -> bool:
            return True

        def data_ptr(self) -> int:
            return address

        def numel(self) -> int:
            return SIZE // 4

        def element_size(self) -> int:
            return 4

    interface = type("Array", (), {"__cuda_array_interface__": {
        "shape": (SIZE // 4,), "typestr": "<f4", "data": (address, False), "version": 3, "stream": 1,
    }})()  # fmt: skip
    for source in (
        Tensor(), interface, DlpackArray(address, SIZE, CUDA), (address, SIZE, "cuda:0"), (address, SIZE, "cuda"),
    ):  # fmt: skip
        region = engine.register(source)
        assert (region.address, region.nbytes, region.location, region.allocated) == (address, SIZE, "cuda:0", False)
        region.release()
    inside = engine.register((address + 4097, 1000, "cuda:0"))
    assert inside.address == address + 4097


def test_the_device_of_memory_is_told(cuda: FakeCuda, engine: TransferEngine) -> None:
    with current(cuda, 1):
        address = cuda.alloc(SIZE)
        assert engine.register((address, SIZE, "cuda")).location == "cuda:1"
        cuda.free(address)


def test_managed_memory_is_a_gpus_or_the_hosts_as_it_is_asked_for(cuda: FakeCuda, engine: TransferEngine) -> None:
    address = ctypes.c_uint64()
    cuda.call("cuMemAllocManaged", ctypes.byref(address), SIZE, 1)
    managed = engine.register(DlpackArray(address.value, SIZE, CUDA_MANAGED))
    assert managed.location == "cuda:0"
    assert engine.register((address.value, SIZE)).location.startswith("cpu")
    cuda.free(address.value)


def test_pinned_memory_is_the_hosts(cuda: FakeCuda, engine: TransferEngine) -> None:
    pinned = ctypes.c_void_p()
    cuda.call("cuMemHostAlloc", ctypes.byref(pinned), SIZE, 0)
    assert pinned.value is not None
    region = engine.register(DlpackArray(pinned.value, SIZE, CUDA_HOST))
    assert region.location.startswith("cpu")
    with pytest.raises(InvalidArgumentError, match="pinned host memory"):
        engine.register((pinned.value, SIZE, "cuda:0"))
    region.release()
    cuda.call("cuMemFreeHost", pinned)


def test_virtual_memory_in_parts_is_one_region(cuda: FakeCuda, engine: TransferEngine) -> None:
    with VirtualMemory(cuda, parts=3, reserved_parts=4) as memory:
        region = engine.register((memory.address + 100, memory.nbytes - 200, "cuda:0"))
        assert region.location == "cuda:0"
        with pytest.raises(OutOfRangeError, match="go beyond their allocation"):
            engine.register((memory.address, memory.nbytes + 1, "cuda:0"))
        region.release()


def test_virtual_memory_needs_a_context_and_makes_none(cuda: FakeCuda, engine: TransferEngine) -> None:
    with VirtualMemory(cuda, parts=1, device=1) as memory:
        made = cuda.alive("primary contexts made")
        with pytest.raises(CudaError, match="no context there"):
            engine.register((memory.address, memory.nbytes, "cuda:1"))
        assert cuda.alive("primary contexts made") == made


# -------------------------------------------------------------------- claims


@pytest.mark.parametrize("claim", ["cuda:0", "cuda:1", "cuda"])
def test_memory_of_the_host_is_no_memory_of_a_gpu(engine: TransferEngine, claim: str) -> None:
    array = np.zeros(SIZE, np.uint8)
    with pytest.raises(InvalidArgumentError, match="is host memory or none, not memory of"):
        engine.register((array.ctypes.data, SIZE, claim))
    with pytest.raises(InvalidArgumentError, match="is host memory"):
        engine.register(DlpackArray(array.ctypes.data, SIZE, CUDA))


def test_memory_of_a_gpu_is_no_memory_of_the_host(engine: TransferEngine, address: int) -> None:
    for source in ((address, SIZE), (address, SIZE, "cpu"), DlpackArray(address, SIZE, CPU)):
        with pytest.raises(InvalidArgumentError, match=r"is memory of cuda:0, not host memory"):
            engine.register(source)


def test_memory_of_one_gpu_is_not_anothers(engine: TransferEngine, address: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is memory of cuda:0, not memory of cuda:1"):
        engine.register((address, SIZE, "cuda:1"))


def test_memory_that_was_not_pinned_is_not_pinned(engine: TransferEngine) -> None:
    array = np.zeros(SIZE, np.uint8)
    with pytest.raises(InvalidArgumentError, match="says that it is pinned"):
        engine.register(DlpackArray(array.ctypes.data, SIZE, CUDA_HOST))


def test_more_than_an_allocation_is_refused(cuda: FakeCuda, engine: TransferEngine) -> None:
    address = cuda.alloc(8 << 20)
    with pytest.raises(OutOfRangeError, match="go beyond their allocation"):
        engine.register((address, (8 << 20) + 1, "cuda:0"))
    cuda.free(address)


@pytest.mark.parametrize("device", ["cuda:x", "gpu", "cuda:-1", 0, None])
def test_devices_have_names(engine: TransferEngine, address: int, device: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="is no device"):
        engine.register((address, SIZE, device))


def test_a_strided_tensor_is_refused(engine: TransferEngine, address: int) -> None:
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        engine.register(DlpackArray(address, SIZE, CUDA, strided=True))


def test_a_region_of_a_gpu_has_no_buffer(engine: TransferEngine, address: int) -> None:
    region: Region = engine.register((address, SIZE, "cuda:0"), "kv")
    with pytest.raises(BufferError, match="memory of a GPU"):
        memoryview(region)


# -------------------------------------------------------------------- the library


def program(text: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text], env=environment(path), capture_output=True, text=True, timeout=60, check=False
    )


def test_memory_of_the_host_needs_no_libcuda() -> None:
    path = library()
    done = program(
        "from moonpool.transfer_engine import TransferEngine\n"
        "with TransferEngine() as engine:\n"
        "    engine.register(bytearray(1 << 20), 'kv')\n"
        "    engine.allocate(1 << 20)\n"
        "print('libcuda' in open('/proc/self/maps').read())\n",
        path,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        (Path("/nowhere/libcuda.so.1"), "cannot open shared object file"),
        (library(without=["cuMemcpyHtoDAsync_v2"]), "has no cuMemcpyHtoDAsync_v2"),
    ],
)
def test_what_is_missing_is_named(path: Path, cause: str) -> None:
    done = program(
        "from moonpool.transfer_engine import CudaError, TransferEngine\n"
        "with TransferEngine() as engine:\n"
        "    for _ in range(2):\n"
        "        try: engine.register((4096, 4096, 'cuda:0'))\n"
        "        except CudaError as error: print(error)\n"
        "    engine.register(bytearray(4096))\n",
        path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(cause) == 2
    assert "driver" in done.stdout
