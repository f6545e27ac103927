# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this host and how RDMA devices reach their memory, for the doctor."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from moonpool.bench.examined import Finding, Host
from moonpool.bench.rdma_host import INFINIBAND
from moonpool.units import format_bytes

__all__ = ["GPU_CHECKS", "Gpu", "NearNic", "gpus"]

_CUDA: Final = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_*
_DMABUF_SUPPORTED: Final = 124
_WRITES_ORDERING: Final = 118
#: From here on what a NIC wrote needs no flush.
_ORDERED_FOR_OWNER: Final = 100
#: The first kernel whose RDMA subsystem takes memory of other devices.
_DMABUF_KERNEL: Final = (5, 12)
#: From near to far, as the engine counts it (``cython_ext/src/pci.hpp``).
_DISTANCES: Final = ("the same switch", "the same host bridge", "the same NUMA node", "another NUMA node")
_PCI_DEVICES: Final = "sys/bus/pci/devices"
# PCI Express Base Specification: the list of capabilities, the one of PCI Express, its device control register.
_CAPABILITIES: Final = 0x34
_EXPRESS: Final = 0x10
_RELAXED_ORDERING: Final = 1 << 4


@dataclass(frozen=True)
class NearNic:
    """An RDMA device as a GPU sees it.

    Attributes:
        device: its name.
        distance: how far it is: one of four, from ``the same switch`` to ``another NUMA node``.
        relaxed_ordering: whether it may write out of order, which is faster; None where the system does not say.
    """

    device: str
    distance: str
    relaxed_ordering: bool | None


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: its CUDA ordinal.
        name: what it is.
        pci: its place on the bus, or None where the driver does not say.
        numa_node: where it is attached, or None where that makes no difference.
        bar_bytes: the largest window of its memory on the bus, or None where the system does not say.
        dmabuf: whether the driver makes dma-bufs of its memory.
        ordered_writes: whether it sees what a NIC wrote without a flush.
        nics: RDMA devices, the nearest first.
    """

    index: int
    name: str
    pci: str | None
    numa_node: int | None
    bar_bytes: int | None
    dmabuf: bool
    ordered_writes: bool
    nics: list[NearNic] = field(default_factory=list)


def gpus(host: Host) -> list[Gpu]:
    """Return what is known of every GPU that the driver shows; none where it does not start."""
    cuda = host.load(_CUDA)
    if cuda is None or cuda.cuInit(0) != 0:
        return []
    count = ctypes.c_int(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return [_gpu(host, cuda, index) for index in range(count.value)]


def _gpu(host: Host, cuda: Any, index: int) -> Gpu:
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, ctypes.c_int(len(name)), ctypes.c_int(index))
    bus_id = ctypes.create_string_buffer(32)
    known = cuda.cuDeviceGetPCIBusId(bus_id, ctypes.c_int(len(bus_id)), ctypes.c_int(index)) == 0
    pci = bus_id.value.decode().lower() if known else None
    where = f"{_PCI_DEVICES}/{pci}"
    nics = [_near(host, nic, pci) for nic in host.names(INFINIBAND)]
    return Gpu(
        index,
        name.value.decode(errors="replace"),
        pci,
        _numa_node(host, where),
        None if pci is None else _largest_window(host, where),
        _attribute(cuda, _DMABUF_SUPPORTED, index) == 1,
        _attribute(cuda, _WRITES_ORDERING, index) >= _ORDERED_FOR_OWNER,
        sorted(nics, key=lambda nic: _DISTANCES.index(nic.distance)),
    )


def _attribute(cuda: Any, which: int, index: int) -> int:
    value = ctypes.c_int(0)
    cuda.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(which), ctypes.c_int(index))
    return value.value


def _numa_node(host: Host, where: str) -> int | None:
    node = int(host.read(f"{where}/numa_node") or -1)
    return None if node < 0 else node


def _largest_window(host: Host, where: str) -> int | None:
    # A line for each: first and last address, flags.
    lines = (line.split() for line in (host.read(f"{where}/resource") or "").splitlines())
    sizes = [int(line[1], 16) - int(line[0], 16) + 1 for line in lines if len(line) == 3 and int(line[1], 16)]
    return max(sizes, default=None)


def _near(host: Host, nic: str, pci: str | None) -> NearNic:
    where = f"{INFINIBAND}/{nic}/device"
    here, there = host.steps(where), [] if pci is None else host.steps(f"{_PCI_DEVICES}/{pci}")
    common = sum(1 for _ in _while_equal(here, there))
    nodes = _numa_node(host, where), None if pci is None else _numa_node(host, f"{_PCI_DEVICES}/{pci}")
    if common:
        # The first step is the host bridge; what they share beyond it is a port whose switch both are behind.
        distance = 0 if common > 1 else 1
    elif None not in nodes and nodes[0] != nodes[1]:
        distance = 3
    else:
        distance = 2 if here and there else 0
    return NearNic(nic, _DISTANCES[distance], _relaxed_ordering(host.read_bytes(f"{where}/config")))


def _while_equal(one: list[str], other: list[str]) -> Iterator[str]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def _relaxed_ordering(config: bytes) -> bool | None:
    """Return what the device control register says; only root may read that far."""
    at = config[_CAPABILITIES] if len(config) > _CAPABILITIES else 0
    for _ in range(48):
        if not 0x40 <= at < len(config) - 10:
            return None
        if config[at] == _EXPRESS:
            return bool(int.from_bytes(config[at + 8 : at + 10], "little") & _RELAXED_ORDERING)
        at = config[at + 1]
    return None


# ---------------------------------------------------------------- findings, in the order of the report


def _memory_over_rdma(host: Host) -> Iterator[Finding]:
    """How a device would reach GPU memory."""
    if not host.names(INFINIBAND):
        return
    name = "GPU memory over RDMA"
    release = host.read("proc/sys/kernel/osrelease") or ""
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    kernel = version >= _DMABUF_KERNEL
    verbs = host.load("libibverbs.so.1")
    library = verbs is not None and hasattr(verbs, "ibv_reg_dmabuf_mr")
    peermem = bool(host.names("sys/module/nvidia_peermem"))
    found = (
        f"dma-buf: {'in' if kernel else 'not in'} kernel {release}, {'in' if library else 'not in'} libibverbs; "
        f"nvidia_peermem: {'loaded' if peermem else 'not loaded'}"
    )
    shown = gpus(host)
    dmabuf = kernel and library and all(gpu.dmabuf for gpu in shown)
    if not host.names("sys/module/nvidia"):
        yield Finding(name, "OK", f"{found}; there is no NVIDIA driver to need them")
    elif dmabuf or peermem:
        yield Finding(name, "OK", found)
    else:
        yield Finding(name, "degraded", f"{found}: it goes through main memory",
                      "modprobe nvidia_peermem, or the driver's open kernel modules with rdma-core 34")  # fmt: skip


def _gpus(host: Host) -> Iterator[Finding]:
    cuda = host.load(_CUDA)
    if cuda is None:
        yield Finding("GPU", "missing", "libcuda is not here", "the NVIDIA driver; --gpus all for the container")
        return
    problem = cuda.cuInit(0)
    if problem:
        yield Finding("GPU", "missing", f"libcuda is here, cuInit says {problem}",
                      "nvidia-smi on this host; --gpus all for the container")  # fmt: skip
        return
    shown = gpus(host)
    if not shown:
        yield Finding("GPU", "missing", "libcuda is here, no device is visible", "CUDA_VISIBLE_DEVICES")
    for gpu in shown:
        yield Finding(f"GPU {gpu.index}", "OK", "\n".join(_lines(gpu)))


def _lines(gpu: Gpu) -> Iterator[str]:
    yield gpu.name
    where = [
        None if gpu.pci is None else f"PCI {gpu.pci}",
        None if gpu.numa_node is None else f"NUMA node {gpu.numa_node}",
        None if gpu.bar_bytes is None else f"BAR of {format_bytes(gpu.bar_bytes)}",
    ]
    if any(where):
        yield ", ".join(part for part in where if part)
    yield (
        f"dma-buf: {'yes' if gpu.dmabuf else 'no'}; "
        f"writes of NICs: {'in order' if gpu.ordered_writes else 'flushed before they are reported'}"
    )
    for nic in gpu.nics:
        ordering = {True: ", relaxed ordering", False: ", strict ordering", None: ""}[nic.relaxed_ordering]
        yield f"  {nic.device}: {nic.distance}{ordering}"


GPU_CHECKS: Final[tuple[Callable[[Host], Iterator[Finding]], ...]] = (_memory_over_rdma, _gpus)
