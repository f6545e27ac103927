# SPDX-License-Identifier: Apache-2.0
"""The memory of one side, the same for every backend of a row."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moonpool.bench.errors import BenchError
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SharedFile", "allocate", "allocate_shared", "available_bytes", "file_of", "map_file"]

# What is left for everything else on the machine.
_SHARE_OF_AVAILABLE = 0.8


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return page-aligned zeroed memory, of huge pages where the system has them, as numpy makes its own arrays.

    Raises:
        BenchError: the machine does not have that much to spare.
    """
    _check_room(nbytes)
    return _huge(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def allocate_shared(nbytes: int) -> NDArray[np.uint8]:
    """Return memory as `allocate` does, that another process can map: see `file_of`."""
    _check_room(nbytes)
    fd = os.memfd_create("mooncake-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        # The mapping keeps a descriptor of its own, by which the other process finds the file.
        return _huge(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED))
    finally:
        os.close(fd)


@dataclass(frozen=True)
class SharedFile:
    """Where another process finds shared memory of this one.

    Attributes:
        pid: of the process that has it.
        fd: its descriptor there.
        offset: where in the file the memory begins.
    """

    pid: int
    fd: int
    offset: int


def file_of(memory: NDArray[np.uint8], proc: Path = Path("/proc/self")) -> SharedFile:
    """Return the file behind shared memory of this process.

    Raises:
        BenchError: it is no mapping of a file, or the file's descriptor is closed.
    """
    address = memory.ctypes.data
    for line in (proc / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
        place, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
        begin, end = (int(part, 16) for part in place.split("-"))
        if not begin <= address < end:
            continue
        if "s" not in permissions or inode == "0":
            raise BenchError("the engine's memory cannot be mapped by another process", path="shm")
        major, minor = (int(part, 16) for part in device.split(":"))
        for entry in (proc / "fd").iterdir():
            try:
                status = entry.stat()
            except OSError:
                continue  # closed meanwhile, such as the one that lists the folder
            if status.st_ino == int(inode) and status.st_dev == os.makedev(major, minor):
                return SharedFile(os.getpid(), int(entry.name), int(offset, 16) + address - begin)
        raise BenchError("the descriptor of the engine's memory is closed: the limit cannot map it", path="shm")
    raise BenchError(f"no mapping holds address {address:#x}", path="shm")


def map_file(file: SharedFile, nbytes: int) -> NDArray[np.uint8]:
    """Map shared memory of another process.

    Raises:
        BenchError: the process is gone, or may not be looked into.
    """
    try:
        fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _huge(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, offset=file.offset))
        finally:
            os.close(fd)
    except OSError as error:
        raise BenchError(f"the target's memory cannot be mapped: {error}", path="shm") from error


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that can be used without swapping, or None where the system does not say."""
    try:
        text = meminfo.read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _check_room(nbytes: int) -> None:
    spare = available_bytes()
    if spare is not None and nbytes > spare * _SHARE_OF_AVAILABLE:
        raise BenchError(
            f"{format_bytes(nbytes)} of memory on this side is more than this machine can spare "
            f"({format_bytes(spare)} available)",
            hint="a smaller --footprint",
        )


def _huge(mapping: mmap.mmap) -> NDArray[np.uint8]:
    # Without huge pages in the kernel (CONFIG_TRANSPARENT_HUGEPAGE) this is an error, and nothing is lost.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)
