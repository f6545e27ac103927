# SPDX-License-Identifier: Apache-2.0
"""What the tests of GPU paths rely on in the stand-in for libcuda."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_cuda import CudaError, FakeCuda, environment, library

INVALID_VALUE, NOT_INITIALIZED, INVALID_CONTEXT, NOT_READY, ILLEGAL_ADDRESS = 1, 3, 201, 600, 700
MAPPED_BYTES = 2 << 20


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda(library())
    fake.start()
    fake.forget_calls()
    yield fake
    fake.set("fail=;delay_us=0")
    fake.stop()
    assert fake.alive("contexts") == 0


def child(path: Path, code: str, *, settings: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in another process, in which `cuda` has begun."""
    text = (
        f"import sys; from pathlib import Path; from fake_cuda import FakeCuda; cuda = FakeCuda(Path({str(path)!r}))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", text + code],
        env={**environment(path, settings), "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def pointer(value: int = 0) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def attribute(cuda: FakeCuda, which: int, address: int, kind: type[ctypes.c_uint64 | ctypes.c_int]) -> int:
    value, whiches = kind(), (ctypes.c_int * 1)(which)
    values = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    cuda.call("cuPointerGetAttributes", ctypes.c_uint(1), whiches, values, address)
    return int(value.value)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "touch", ["ctypes.string_at(at, 1)", "ctypes.memset(at, 0, 1)", "ctypes.string_at(at + 9999, 1)"]
)
def test_a_cpu_that_touches_device_memory_faults(touch: str) -> None:
    code = f"import ctypes; cuda.start(); at = cuda.alloc(10_000); print('so far', flush=True); {touch}; print('read')"
    done = child(library(), code)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "so far\n"


def test_freed_memory_faults_too() -> None:
    code = "import ctypes; cuda.start(); at = cuda.alloc(9); cuda.free(at); print('so far', flush=True)\n"
    done = child(library(), code + "ctypes.string_at(at, 1)")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "so far\n")


def test_memory_that_is_opened_can_be_touched() -> None:
    code = (
        "import ctypes; cuda.start(); m = cuda.memory(b'abc')\n"
        "with cuda.opened(m.address, 3): print(ctypes.string_at(m.address, 3), flush=True)\n"
        "ctypes.string_at(m.address, 3)"
    )
    done = child(library(), code)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "b'abc'\n")


def test_an_address_comes_again_with_another_buffer_id(cuda: FakeCuda) -> None:
    first = cuda.alloc(5000)
    id_of_first = attribute(cuda, 7, first + 4000, ctypes.c_uint64)
    cuda.free(first)
    assert attribute(cuda, 7, first, ctypes.c_uint64) == 0
    second = cuda.alloc(5000)
    assert second == first
    assert attribute(cuda, 7, second, ctypes.c_uint64) not in (0, id_of_first)
    cuda.free(second)


def test_an_interior_pointer_knows_its_allocation(cuda: FakeCuda) -> None:
    at = cuda.alloc(5000)
    base, size = pointer(), pointer()
    cuda.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at + 4999)
    assert (base.value, size.value) == (at, 5000)
    assert attribute(cuda, 2, at + 4999, ctypes.c_int) == 2
    assert attribute(cuda, 9, at + 4999, ctypes.c_int) == 0
    assert attribute(cuda, 2, at + 5000, ctypes.c_int) == 0
    cuda.free(at)


def test_host_memory_is_unknown_until_it_is_registered(cuda: FakeCuda) -> None:
    memory = ctypes.create_string_buffer(8192)
    at = ctypes.addressof(memory)
    assert attribute(cuda, 2, at, ctypes.c_int) == 0
    cuda.call("cuMemHostRegister_v2", at, 8192, 0)
    assert attribute(cuda, 2, at + 8191, ctypes.c_int) == 1
    assert cuda.code("cuMemHostRegister_v2", at + 4096, 16, 0) == 712
    cuda.call("cuMemHostUnregister", at)
    assert cuda.code("cuMemHostUnregister", at) == 713
    assert attribute(cuda, 2, at, ctypes.c_int) == 0


def test_managed_memory_is_of_both(cuda: FakeCuda) -> None:
    at = pointer()
    cuda.call("cuMemAllocManaged", ctypes.byref(at), 100, 1)
    ctypes.memset(at.value, 7, 100)
    assert attribute(cuda, 8, at.value, ctypes.c_int) == 1
    assert cuda.peek(at.value, 100) == b"\7" * 100
    cuda.free(at.value)


def test_a_device_can_be_full() -> None:
    code = (
        "from fake_cuda import CudaError\ncuda.start(); at = cuda.alloc(1 << 20)\n"
        "try: cuda.alloc(1 << 20)\nexcept CudaError as error: print(error)\ncuda.free(at); cuda.alloc(1 << 20)"
    )
    done = child(library(), code, settings="memory=1500000")
    assert (done.stdout, done.stderr) == ("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY\n", "")


# ---------------------------------------------------------------- contexts


def test_a_context_is_active_while_somebody_retains_it() -> None:
    fake = FakeCuda(library())
    fake.call("cuInit", 0)
    flags, active = ctypes.c_uint(), ctypes.c_int()
    made = fake.alive("primary contexts made")
    for expected in (0, 1, 0):
        fake.call("cuDevicePrimaryCtxGetState", 0, ctypes.byref(flags), ctypes.byref(active))
        assert active.value == expected
        if not expected and fake.alive("primary contexts made") == made:
            fake.start()
        elif expected:
            assert fake.code("cuMemAlloc_v2", ctypes.byref(pointer()), 0) == INVALID_VALUE
            fake.stop()
            assert fake.code("cuMemAlloc_v2", ctypes.byref(pointer()), 16) == INVALID_CONTEXT
    assert fake.alive("primary contexts made") == made + 1


def test_nothing_goes_before_it_is_initialised_and_in_a_forked_child() -> None:
    code = (
        "import ctypes, os; n = ctypes.c_int()\n"
        "print(cuda.code('cuDeviceGetCount', ctypes.byref(n)))\ncuda.start()\n"
        "print(cuda.code('cuDeviceGetCount', ctypes.byref(n)), n.value, flush=True)\n"
        "if os.fork() == 0: os._exit(cuda.code('cuDeviceGetCount', ctypes.byref(n)))\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert child(library(), code, settings="devices=3").stdout == f"{NOT_INITIALIZED}\n0 3\n{NOT_INITIALIZED}\n"


def test_a_sticky_error_ends_a_context(cuda: FakeCuda) -> None:
    at = cuda.alloc(64)
    cuda.set(f"fail=cuMemcpyAsync:2:{ILLEGAL_ADDRESS}:sticky")
    cuda.call("cuMemcpyAsync", at, at + 32, 32, 0)
    assert cuda.code("cuMemcpyAsync", at, at + 32, 32, 0) == ILLEGAL_ADDRESS
    assert cuda.code("cuMemAlloc_v2", ctypes.byref(pointer()), 16) == ILLEGAL_ADDRESS


def test_an_error_of_work_comes_with_the_next_question(cuda: FakeCuda) -> None:
    at, stream, event = cuda.alloc(64), cuda.stream(), cuda.event()
    cuda.set(f"fail=execute:1:{ILLEGAL_ADDRESS}")
    with cuda.held():
        cuda.call("cuMemcpyAsync", at, at + 32, 32, ctypes.c_void_p(stream))
        cuda.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))
        assert cuda.code("cuEventQuery", ctypes.c_void_p(event)) == NOT_READY
    assert cuda.code("cuEventSynchronize", ctypes.c_void_p(event)) == ILLEGAL_ADDRESS


# ---------------------------------------------------------------- streams


def test_a_copy_is_not_done_when_its_call_returns(cuda: FakeCuda) -> None:
    source, target = cuda.memory(b"s" * 64), cuda.memory(b"t" * 64)
    stream, other, event = cuda.stream(), cuda.stream(), cuda.event()
    with cuda.held():
        cuda.call("cuMemcpyAsync", target.address, source.address, 64, ctypes.c_void_p(stream))
        cuda.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))
        cuda.call("cuStreamWaitEvent", ctypes.c_void_p(other), ctypes.c_void_p(event), 0)
        assert cuda.code("cuStreamQuery", ctypes.c_void_p(stream)) == NOT_READY
        assert cuda.code("cuStreamQuery", ctypes.c_void_p(other)) == NOT_READY
        assert cuda.peek(target.address, 64) == b"t" * 64
    cuda.call("cuStreamSynchronize", ctypes.c_void_p(other))
    assert cuda.peek(target.address, 64) == b"s" * 64
    assert cuda.calls("bytes DtoD") == 64
    for memory in (source, target):
        cuda.free(memory.address)
    for handle in (stream, other):
        cuda.call("cuStreamDestroy_v2", ctypes.c_void_p(handle))
    cuda.call("cuEventDestroy_v2", ctypes.c_void_p(event))
    assert (cuda.alive("streams"), cuda.alive("events"), cuda.alive("allocations")) == (0, 0, 0)


def test_memory_that_is_not_pinned_is_counted_and_waited_for(cuda: FakeCuda) -> None:
    memory, stream = cuda.memory(b"x" * 100), cuda.stream()
    into = ctypes.create_string_buffer(100)
    cuda.call("cuMemcpyDtoHAsync_v2", into, memory.address, 100, ctypes.c_void_p(stream))
    assert into.raw == b"x" * 100
    assert cuda.calls("pageable copies") == 1
    cuda.free(memory.address)


def test_a_batch_takes_no_memory_that_is_not_pinned(cuda: FakeCuda) -> None:
    memory, stream = cuda.memory(b"x" * 100), cuda.stream()
    into = ctypes.create_string_buffer(100)
    targets, sources = (ctypes.c_uint64 * 2)(memory.address, ctypes.addressof(into)), (ctypes.c_uint64 * 2)()
    sources[:] = [memory.address + 50, memory.address]
    sizes, first, bad = (ctypes.c_size_t * 2)(50, 100), ctypes.c_size_t(0), ctypes.c_size_t()
    attributes = (ctypes.c_int * 6)(1)
    code = cuda.code(
        "cuMemcpyBatchAsync", targets, sources, sizes, 2, attributes, ctypes.byref(first), 1, ctypes.byref(bad),
        ctypes.c_void_p(stream),
    )  # fmt: skip
    assert (code, bad.value) == (INVALID_VALUE, 1)
    cuda.free(memory.address)


def test_a_function_can_be_missing() -> None:
    older = FakeCuda(library(without=["cuMemcpyBatchAsync"]))
    assert not hasattr(older.lib, "cuMemcpyBatchAsync")
    assert hasattr(older.lib, "cuMemcpyAsync")


# ---------------------------------------------------------------- mapped memory


def mapped(cuda: FakeCuda, parts: int, *, access: int = 3) -> tuple[int, list[int]]:
    """Map so many handles one after the other; return where, and the handles."""
    prop = (ctypes.c_uint32 * 8)(1, 1, 1, 0)
    address, handles = pointer(), []
    cuda.call("cuMemAddressReserve", ctypes.byref(address), (parts + 1) * MAPPED_BYTES, 0, 0, 0)
    for part in range(parts):
        handle = pointer()
        cuda.call("cuMemCreate", ctypes.byref(handle), MAPPED_BYTES, prop, 0)
        cuda.call("cuMemMap", address.value + part * MAPPED_BYTES, MAPPED_BYTES, 0, handle.value, 0)
        handles.append(handle.value)
    desc = (ctypes.c_int * 3)(1, 0, access)
    cuda.call("cuMemSetAccess", address.value, parts * MAPPED_BYTES, desc, 1)
    return address.value, handles


def unmap(cuda: FakeCuda, at: int, handles: list[int]) -> None:
    cuda.call("cuMemUnmap", at, len(handles) * MAPPED_BYTES)
    for handle in handles:
        cuda.call("cuMemRelease", handle)
    cuda.call("cuMemAddressFree", at, (len(handles) + 1) * MAPPED_BYTES)
    assert (cuda.alive("mappings"), cuda.alive("handles"), cuda.alive("reservations")) == (0, 0, 0)


def test_a_copy_goes_across_mappings_and_not_beyond(cuda: FakeCuda) -> None:
    at, handles = mapped(cuda, 2)
    text = b"over the seam"
    cuda.call("cuMemcpyHtoD_v2", at + MAPPED_BYTES - 5, text, len(text))
    assert cuda.peek(at + MAPPED_BYTES - 5, len(text)) == text
    assert cuda.code("cuMemcpyHtoD_v2", at + 2 * MAPPED_BYTES - 5, text, len(text)) == INVALID_VALUE
    assert attribute(cuda, 1, at, ctypes.c_uint64) == 0
    # As the driver says of RANGE_SIZE: of all that was reserved.
    assert attribute(cuda, 12, at, ctypes.c_uint64) == 3 * MAPPED_BYTES
    assert attribute(cuda, 18, at + MAPPED_BYTES, ctypes.c_uint64) == MAPPED_BYTES
    assert (attribute(cuda, 13, at, ctypes.c_int), attribute(cuda, 13, at + 2 * MAPPED_BYTES, ctypes.c_int)) == (1, 0)
    assert cuda.code("cuIpcGetMemHandle", ctypes.create_string_buffer(64), at) == INVALID_VALUE
    unmap(cuda, at, handles)


def test_mapped_memory_needs_access(cuda: FakeCuda) -> None:
    at, handles = mapped(cuda, 1, access=1)
    assert cuda.code("cuMemcpyHtoD_v2", at, b"abc", 3) == INVALID_VALUE
    cuda.call("cuMemcpyDtoH_v2", ctypes.create_string_buffer(3), at, 3)
    unmap(cuda, at, handles)


def test_mapped_memory_goes_through_a_descriptor(cuda: FakeCuda) -> None:
    at, handles = mapped(cuda, 1)
    retained, fd, imported = pointer(), ctypes.c_int(), pointer()
    cuda.call("cuMemRetainAllocationHandle", ctypes.byref(retained), at + 100)
    assert retained.value == handles[0]
    cuda.call("cuMemRelease", retained.value)
    cuda.call("cuMemExportToShareableHandle", ctypes.byref(fd), handles[0], 1, 0)
    cuda.call("cuMemImportFromShareableHandle", ctypes.byref(imported), ctypes.c_void_p(fd.value), 1)
    os.close(fd.value)
    other = pointer()
    cuda.call("cuMemAddressReserve", ctypes.byref(other), MAPPED_BYTES, 0, 0, 0)
    cuda.call("cuMemMap", other.value, MAPPED_BYTES, 0, imported.value, 0)
    cuda.poke(at + 17, b"the same pages")
    assert cuda.peek(other.value + 17, 14) == b"the same pages"
    cuda.call("cuMemUnmap", other.value, MAPPED_BYTES)
    cuda.call("cuMemRelease", imported.value)
    cuda.call("cuMemAddressFree", other.value, MAPPED_BYTES)
    unmap(cuda, at, handles)


def test_a_dmabuf_is_of_whole_pages_of_one_allocation(cuda: FakeCuda) -> None:
    at, handles = mapped(cuda, 2)
    fd, data, size = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    export = ("cuMemGetHandleForAddressRange", ctypes.byref(fd))
    assert cuda.code(*export, at + 100, 4096, 1, 0) == INVALID_VALUE
    assert cuda.code(*export, at, 2 * MAPPED_BYTES, 1, 0) == INVALID_VALUE
    cuda.poke(at + MAPPED_BYTES + 8192, b"here")
    cuda.call(*export, at + MAPPED_BYTES + 8192, 4096, 1, 0)
    assert os.read(fd.value, 4) == b"here"
    assert cuda.lib.fakeCudaDmabuf(fd, ctypes.byref(data), ctypes.byref(size)) == 0
    assert (ctypes.string_at(data.value or 0, 4), size.value) == (b"here", 4096)
    os.close(fd.value)
    cuda.set("attribute.124=0")
    assert cuda.code(*export, at, 4096, 1, 0) == 801
    cuda.set("attribute.124=1")
    unmap(cuda, at, handles)


# ---------------------------------------------------------------- other processes


def test_memory_and_events_of_another_process(cuda: FakeCuda) -> None:
    memory, event = cuda.memory(b"from there" + bytes(9000)), cuda.event(6)
    of_memory, of_event = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    cuda.call("cuIpcGetMemHandle", of_memory, memory.address + 100)
    cuda.call("cuIpcGetEventHandle", of_event, ctypes.c_void_p(event))

    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_char * 64),)

    mine = Handle.from_buffer(of_memory)
    assert cuda.code("cuIpcOpenMemHandle_v2", ctypes.byref(pointer()), mine, ctypes.c_uint(1)) == INVALID_CONTEXT
    code = (
        "import ctypes\nclass Handle(ctypes.Structure): _fields_ = (('bytes', ctypes.c_char * 64),)\n"
        f"memory, event = (Handle.from_buffer_copy(one) for one in ({of_memory.raw!r}, {of_event.raw!r}))\n"
        "cuda.start(); at, again, opened = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p()\n"
        "cuda.call('cuIpcOpenMemHandle_v2', ctypes.byref(at), memory, ctypes.c_uint(1))\n"
        "cuda.call('cuIpcOpenMemHandle_v2', ctypes.byref(again), memory, ctypes.c_uint(1))\n"
        "cuda.call('cuIpcOpenEventHandle', ctypes.byref(opened), event)\n"
        "print(at.value == again.value, cuda.peek(at.value, 10).decode())\n"
        "cuda.poke(at.value, b'from here ')\n"
        "cuda.call('cuEventRecord', opened, ctypes.c_void_p()); cuda.call('cuEventSynchronize', opened)\n"
        "cuda.call('cuIpcCloseMemHandle', at.value); print(cuda.alive('imports'))\n"
        "cuda.call('cuIpcCloseMemHandle', at.value); print(cuda.alive('imports'))"
    )
    done = child(library(), code)
    assert (done.stdout, done.stderr) == ("True from there\n1\n0\n", "")
    assert cuda.peek(memory.address, 10) == b"from here "
    assert cuda.code("cuEventQuery", ctypes.c_void_p(event)) == 0
    cuda.free(memory.address)
    # What was freed cannot be opened any more.
    assert "CUDA_ERROR" in child(library(), code).stderr


def test_errors_have_the_names_of_the_driver(cuda: FakeCuda) -> None:
    with pytest.raises(CudaError, match="cuMemFree_v2: CUDA_ERROR_INVALID_VALUE"):
        cuda.free(4096)
