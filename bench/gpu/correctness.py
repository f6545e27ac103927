# SPDX-License-Identifier: Apache-2.0
"""Every byte of every path between two processes, and of copies in one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from moonpool.bench.gpu.driver import GRANULE, Driver
from moonpool.bench.gpu.other import DEADLINE_S, Other, content, digest
from moonpool.bench.gpu.run import MIB, Run
from moonpool.transfer_engine import Peer, Region, TransferEngine, copy_batch
from moonpool.units import format_bytes

__all__ = ["check_bytes", "move_tensor"]


@dataclass
class Memory:
    """Registered memory of this process, and how it is filled and looked at."""

    region: Region
    put: Callable[[np.ndarray[Any, Any]], None]
    get: Callable[[], np.ndarray[Any, Any]]


def gpu_memory(driver: Driver, engine: TransferEngine, address: int, nbytes: int) -> Memory:
    """Register memory of the device."""
    region = engine.register((address, nbytes, f"cuda:{driver.device}"))
    return Memory(region, lambda new: driver.put(address, new), lambda: driver.get(address, nbytes))


def host_memory(engine: TransferEngine, nbytes: int) -> Memory:
    """Register memory of the host."""
    array = np.zeros(nbytes, np.uint8)
    return Memory(engine.register(array), lambda new: np.copyto(array, new), array.copy)


def exchange(run: Run, other: Other, engine: TransferEngine, peer: Peer, here: Memory, there: str) -> str:
    """Move pieces both ways; return what is wrong afterwards, or ``""``."""
    nbytes = run.plan.nbytes
    remote = peer.regions.wait(there, DEADLINE_S)
    for post in (engine.write, engine.read):
        for number, (ours, theirs, length) in enumerate(run.pieces(seed=1)):
            expected, expected_there = content(nbytes, 2 * number + 1), content(nbytes, 2 * number + 2)
            here.put(expected)
            other.ask(seed=2 * number + 2)
            post(peer, here.region, remote, ours, theirs, length, deadline=DEADLINE_S).wait(DEADLINE_S)
            to, source = (expected_there, expected) if post == engine.write else (expected, expected_there)
            into, out_of = (theirs, ours) if post == engine.write else (ours, theirs)
            for at, begin in zip(into.tolist(), out_of.tolist(), strict=True):
                to[at : at + length] = source[begin : begin + length]
            what = f"{post.__name__} of {len(ours)} pieces of {length} bytes"
            if not np.array_equal(here.get(), expected):
                return f"{what}: the memory of this process is not what it has to be"
            if other.ask(of=there)["digest"] != digest(expected_there):
                return f"{what}: the memory of the other process is not what it has to be"
    return ""


def check_path(run: Run, other: Other, name: str, transports: str, make: Callable[[TransferEngine], Memory],
               there: str) -> None:  # fmt: skip
    """Move bytes over one path, and see that it was that path."""
    with TransferEngine("gpu-check", listen=None, transports=transports) as engine:
        peer = engine.connect(other.address, timeout=DEADLINE_S)
        wrong = exchange(run, other, engine, peer, make(engine), there)
        over = sorted(path for path, counts in engine.stats()["paths"].items() if counts["completed"])
        wanted = transports.partition(",")[0]
        if wrong:
            run.note(name, "failed", ", ".join(over), "every byte", wrong)
        elif over != [wanted]:
            run.note(name, "skipped", f"went over {', '.join(over)}", wanted, peer.fallback)
        else:
            run.note(name, "passed", f"over {wanted}", "every byte")


def check_bytes(run: Run, other: Other) -> None:
    """Move bytes over every path between the two processes."""
    driver, nbytes = run.driver, run.plan.nbytes
    with driver.memory(nbytes) as address:

        def on_gpu(engine: TransferEngine) -> Memory:
            return gpu_memory(driver, engine, address, nbytes)

        def on_host(engine: TransferEngine) -> Memory:
            return host_memory(engine, nbytes)

        for name, transports, make, there in (
            ("staged TCP, GPU to GPU", "tcp", on_gpu, "gpu"),
            ("staged TCP, host to GPU", "tcp", on_host, "gpu"),
            ("staged TCP, GPU to host", "tcp", on_gpu, "host"),
            ("CUDA IPC, GPU to GPU", "cuda_ipc,tcp", on_gpu, "gpu"),
            ("RDMA, GPU to GPU", "rdma,tcp", on_gpu, "gpu"),
        ):
            run.make(name, lambda: check_path(run, other, name, transports, make, there))  # noqa: B023 - now
        run.make("H2D and D2H in one process", lambda: check_copies(run, address))
        run.make("dma-buf export", lambda: check_dmabuf(run, address))
    run.make("virtual memory", lambda: check_mapped(run, other))
    run.make("expandable_segments", lambda: check_torch(run, other))


def check_copies(run: Run, address: int) -> None:
    """Scatter pieces to the GPU and gather them again, from memory that is pinned and memory that is not."""
    driver, nbytes = run.driver, run.plan.nbytes
    with driver.pinned(nbytes) as pinned, TransferEngine("gpu-check", listen=None, transports="tcp") as engine:
        gpu = gpu_memory(driver, engine, address, nbytes)
        as_pinned = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pinned))
        for name, host in (("H2D and D2H, pinned", as_pinned), ("H2D and D2H, not pinned", np.zeros(nbytes, np.uint8))):
            for ours, theirs, length in run.pieces(seed=2):
                host[:], before = content(nbytes, 3), content(nbytes, 4)
                gpu.put(before)
                copy_batch(gpu.region, theirs, host, ours, length)
                for at, begin in zip(theirs.tolist(), ours.tolist(), strict=True):
                    before[at : at + length] = host[begin : begin + length]
                arrived = gpu.get()
                back = np.zeros(nbytes, np.uint8)
                host[:] = 0
                copy_batch(host, ours, gpu.region, theirs, length)
                for at, begin in zip(ours.tolist(), theirs.tolist(), strict=True):
                    back[at : at + length] = before[begin : begin + length]
                if not np.array_equal(arrived, before) or not np.array_equal(host, back):
                    run.note(name, "failed", "", "every byte", f"{len(ours)} pieces of {length} bytes are wrong")
                    break
            else:
                run.note(name, "passed", "", "every byte")


def check_dmabuf(run: Run, address: int) -> None:
    """Export memory as RDMA devices take it."""
    if not run.driver.attribute(124):
        run.note("dma-buf export", "skipped", detail="the driver has none: it needs the open kernel module of NVIDIA")
        return
    fd = ctypes.c_int(-1)
    run.driver.call("cuMemGetHandleForAddressRange", ctypes.byref(fd), address, run.plan.nbytes, ctypes.c_int(1), 0)
    os.close(fd.value)
    run.note("dma-buf export", "passed", format_bytes(run.plan.nbytes))


def check_mapped(run: Run, other: Other) -> None:
    """Move memory that is mapped in parts, as torch has it with expandable_segments."""
    if not run.driver.attribute(102):
        run.note("virtual memory", "skipped", detail="the device has none")
        return
    with run.driver.mapped(run.plan.nbytes // GRANULE) as address:

        def make(engine: TransferEngine) -> Memory:
            return gpu_memory(run.driver, engine, address, run.plan.nbytes)

        for transports in ("tcp", "cuda_ipc,tcp"):
            name = f"virtual memory, {transports.partition(',')[0]}"
            run.make(name, lambda: check_path(run, other, name, transports, make, "gpu"))  # noqa: B023 - now


def check_torch(run: Run, other: Other) -> None:
    """The same with torch itself."""
    if find_spec("torch") is None:
        run.note("expandable_segments", "skipped", detail="there is no torch here")
        return
    command = [
        sys.executable,
        "-m",
        "moonpool.bench.gpu.command",
        "--torch",
        other.address,
        "--device",
        str(run.driver.device),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, check=False,
        capture_output=True, text=True, timeout=4 * DEADLINE_S,
    )  # fmt: skip
    if done.returncode == 3:
        run.note("expandable_segments", "skipped", detail=done.stdout.strip())
    elif done.returncode != 0:
        run.note("expandable_segments", "failed", "", "every byte", " ".join(done.stderr.split()[-60:]))
    else:
        run.note("expandable_segments", "passed", done.stdout.strip(), "every byte")


def move_tensor(address: str, device: int) -> None:
    """Be a program with torch: write a tensor to the other process, read it into another tensor, and compare."""
    import torch

    if not torch.cuda.is_available():
        sys.stdout.write("torch sees no GPU\n")
        sys.exit(3)
    nbytes = 3 * MIB
    tensors = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=f"cuda:{device}") for _ in range(2)]
    torch.cuda.synchronize()
    with TransferEngine("gpu-check torch", listen=None) as engine:
        there, back = (engine.register(tensor) for tensor in tensors)
        peer = engine.connect(address, timeout=DEADLINE_S)
        remote = peer.regions.wait("gpu", DEADLINE_S)
        engine.write(peer, there, remote, 0, 0, nbytes, deadline=DEADLINE_S).wait(DEADLINE_S)
        engine.read(peer, back, remote, 0, 0, nbytes, deadline=DEADLINE_S).wait(DEADLINE_S)
        over = [path for path, counts in engine.stats()["paths"].items() if counts["completed"]]
    if not torch.equal(*tensors):
        sys.exit("the tensor that came back is another one")
    sys.stdout.write(f"over {', '.join(over)}\n")
