# SPDX-License-Identifier: Apache-2.0
"""A driver that refuses calls, a context that is dead, memory that was freed: typed errors, and the engine lives on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cuda_testing.contexts import current
from cuda_testing.ends import SIZE, Connect, Ends, content
from fake_cuda import DeviceMemory, FakeCuda, environment, library

from moonpool.transfer_engine import (
    CudaError,
    InvalidArgumentError,
    MoonpoolError,
    RegionReleasedError,
    TransportUnavailableError,
)

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
SIDES = ["dh", "hd", "dd"]


def write(ends: Ends) -> None:
    ends.engine.write(ends.peer, ends.here.region, ends.remote, digest=True).wait(30)


def cuda_address_of(ends: Ends) -> int:
    return next(int(one.memory.address) for one in (ends.here, ends.there) if isinstance(one.memory, DeviceMemory))


def failure_of(ends: Ends) -> MoonpoolError | None:
    try:
        write(ends)
    except MoonpoolError as error:
        return error
    return None


@pytest.mark.parametrize("sides", ["dh", "hd"])
@pytest.mark.parametrize(
    "function",
    [
        "cuCtxPushCurrent_v2",
        "cuPointerGetAttributes",
        "cuMemHostRegister_v2",
        "cuStreamCreateWithPriority",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
    ],
)
def test_a_call_that_fails_fails_its_transfer_at_most(
    connect: Connect, cuda: FakeCuda, sides: str, function: str
) -> None:
    ends = connect(sides)
    cuda.set(f"fail={function}:1:{OUT_OF_MEMORY}")
    failure = failure_of(ends)
    cuda.set("fail=")
    if failure is None:
        assert ends.there.peek() == content(1).tobytes()
    else:
        assert failure.code in ("CUDA", "NO_MEMORY")
        # What the peer met crosses the wire as a number.
        assert sides == "hd" or "CUDA_ERROR_OUT_OF_MEMORY" in failure.cause
    write(ends)
    assert ends.there.peek() == content(1).tobytes()


def test_a_stream_of_nowhere_is_refused(connect: Connect, cuda: FakeCuda) -> None:
    ends = connect("dh")
    cuda.set("fail=cuEventRecord:1:400")
    with pytest.raises(CudaError, match="stream that was given") as failed:
        ends.engine.write(ends.peer, ends.here.region, ends.remote, stream=0x1234).wait(30)
    assert "CUDA_ERROR_INVALID_HANDLE" in failed.value.cause
    write(ends)


@pytest.mark.parametrize("sides", SIDES)
def test_the_engine_lives_on_when_a_context_is_dead(connect: Connect, cuda: FakeCuda, sides: str) -> None:
    ends = connect(sides)
    write(ends)
    cuda.kill_context(0, ILLEGAL_ADDRESS)
    try:
        for _ in range(3):
            with pytest.raises(CudaError) as failed:
                write(ends)
            if sides == "hd":
                assert "CUDA driver error there" in str(failed.value)
            else:
                assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failed.value.cause
        target = ends.server.allocate(1 << 20, "host")
        source = ends.engine.allocate(1 << 20)
        memoryview(source)[:5] = b"alive"
        ends.engine.write(ends.peer, source, ends.peer.regions.wait("host", 10)).wait(30)
        assert bytes(target)[:5] == b"alive"
        with pytest.raises(CudaError) as failed:
            ends.engine.register(DeviceMemory(cuda_address_of(ends), 1000))
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failed.value.cause
        ends.here.region.release()
        ends.there.region.release()
    finally:
        cuda.kill_context(0, 0)


@pytest.mark.parametrize("side", ["here", "there"])
@pytest.mark.parametrize("again", [False, True])
def test_memory_that_was_freed_is_not_touched(connect: Connect, cuda: FakeCuda, side: str, again: bool) -> None:
    ends = connect("dd")
    write(ends)
    memory = getattr(ends, side).memory
    cuda.free(memory.address)
    kept = []
    try:
        # Other memory may lie there by now.
        while again and memory.address not in kept:
            kept.append(cuda.alloc(SIZE))
            assert len(kept) < 100
        before = cuda.calls("bytes DtoH") + cuda.calls("bytes HtoD")
        for start in (ends.engine.read, ends.engine.write):
            with pytest.raises(RegionReleasedError, match="freed while it was registered"):
                start(ends.peer, ends.here.region, ends.remote, 0, 0, 1000).wait(30)
        if side == "here":
            assert cuda.calls("bytes DtoH") + cuda.calls("bytes HtoD") == before
    finally:
        for address in kept:
            cuda.free(address)
        memory.address = cuda.memory(bytes(SIZE)).address  # for the fixture to free
    getattr(ends, side).region.release()


def test_memory_of_two_gpus_is_not_one_transfer(connect: Connect, cuda: FakeCuda) -> None:
    ends = connect("dh")
    with current(cuda, 1):
        other = cuda.memory(bytes(1000), 1)
        second = ends.engine.register(other)
        with pytest.raises(InvalidArgumentError, match="several GPUs"):
            ends.engine.read(ends.peer, ([ends.here.region, second], [0, 1]), ends.remote, [0, 0], 0, 1000)
        ends.engine.read(ends.peer, second, ends.remote, 0, 0, 1000).wait(30)
        assert cuda.peek(other.address, 1000) == content(2)[:1000].tobytes()
        ends.engine.close()
        cuda.free(other.address)


def test_without_staging_nothing_passes_through_the_host_of_the_peer(connect: Connect) -> None:
    ends = connect("hd", cuda_staging=False)
    for start in (ends.engine.write, ends.engine.read):
        with pytest.raises(TransportUnavailableError, match="cuda_staging"):
            start(ends.peer, ends.here.region, ends.remote).wait(30)
    assert ends.there.peek() == content(2).tobytes()
    assert ends.server.stats()["staged_to_gpu_bytes"] == 0


STARTING = """
from fake_cuda import FakeCuda, library
from moonpool.transfer_engine import OutOfMemoryError, TransferEngine

cuda = FakeCuda(library())
cuda.start()
memory = cuda.memory(bytes(1000))
cuda.set("fail=cuInit:1:2")
with TransferEngine("engine") as engine:
    try:
        engine.register(memory)
    except OutOfMemoryError as error:
        print(error.cause.split(":")[0])
    cuda.set("fail=")
    print(engine.register(memory).location)
"""


def test_a_driver_that_did_not_start_is_tried_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTING],
        env={**environment(library()), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "CUDA_ERROR_OUT_OF_MEMORY\ncuda:0\n"), done.stderr


CLOSING = """
from cuda_testing.ends import connected, content
from fake_cuda import FakeCuda, library
from moonpool.transfer_engine import TransferEngine
import sys

def open_engine(name, **options):
    return TransferEngine(name, progress_timeout=0.3, **options)

cuda = FakeCuda(library())
cuda.start()
ends = next(connected(cuda, open_engine))("dh")
ends.engine.write(ends.peer, ends.here.region, ends.remote).wait(30)
if sys.argv[1] == "hangs":
    cuda.lib.fakeCudaHold(1)
    transfer = ends.engine.write(ends.peer, ends.here.region, ends.remote)
else:
    cuda.kill_context(0, 700)
    transfer = None
ends.engine.close()
ends.server.close()
assert transfer is None or transfer.done()
assert ends.there.peek() == content(1).tobytes()
cuda.lib.fakeCudaHold(0)
print("closed")
"""


@pytest.mark.parametrize("device", ["hangs", "is dead"])
def test_closing_does_not_wait_for_a_device(device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSING, device],
        env={**environment(library()), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
