# SPDX-License-Identifier: Apache-2.0
"""What transfers between two processes of one host need, for the doctor."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from typing import Final

from moonpool.bench.examined import Finding, Host

__all__ = ["SAME_HOST_CHECKS"]

#: The kernel's default. Every region that is mapped from another process takes one.
_MAPS_MIN: Final = 65530
#: A namespace may forbid memory that can be executed, and some sandboxes forbid all of it.
_MFD_CLOEXEC: Final = 1


def _hugepages(host: Host) -> Iterator[Finding]:
    match = re.search(r"\[(\w+)\]", host.read("sys/kernel/mm/transparent_hugepage/enabled") or "")
    if match is None:
        yield Finding("transparent huge pages", "degraded", "not in this kernel: copies touch more pages")
    elif match[1] == "never":
        yield Finding(
            "transparent huge pages", "degraded", "never: copies touch more pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip
    else:
        yield Finding("transparent huge pages", "OK", match[1])


def _shared_hugepages(host: Host) -> Iterator[Finding]:
    name = "shared huge pages"
    match = re.search(r"\[(\w+)\]", host.read("sys/kernel/mm/transparent_hugepage/shmem_enabled") or "")
    if match is None:
        return  # said already: no huge pages in this kernel
    if match[1] in ("always", "within_size", "advise", "force"):
        yield Finding(name, "OK", f"{match[1]} (shmem_enabled): mapped memory may have them")
    else:
        yield Finding(
            name, "degraded", f"{match[1]} (shmem_enabled): mapped memory is cut into small pages",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )  # fmt: skip


def _memfd(host: Host) -> Iterator[Finding]:
    libc = host.load("libc.so.6")
    fd = -1 if libc is None else int(libc.memfd_create(b"mooncake-bench", ctypes.c_uint(_MFD_CLOEXEC)))
    if fd < 0:
        yield Finding(
            "memfd", "missing", "memfd_create is refused, as a sandbox does: no memory can be shared",
            "a seccomp profile that allows memfd_create",
        )  # fmt: skip
        return
    os.close(fd)
    yield Finding("memfd", "OK", "memory can be shared with processes that are handed its descriptor")


def _maps(host: Host) -> Iterator[Finding]:
    text = host.read("proc/sys/vm/max_map_count")
    if text is None:
        return
    if int(text) >= _MAPS_MIN:
        yield Finding("memory mappings", "OK", f"{text} (vm.max_map_count)")
    else:
        yield Finding(
            "memory mappings", "degraded", f"{text} (vm.max_map_count): every region that is mapped takes one",
            f"sysctl -w vm.max_map_count={_MAPS_MIN}",
        )  # fmt: skip


_PTRACE: Final = {
    "1": "1: only a parent may read its children",
    "2": "2: only with CAP_SYS_PTRACE",
    "3": "3: nobody may",
}


def _process_vm(host: Host) -> Iterator[Finding]:
    if not _can_read_itself(host):
        yield Finding(
            "process_vm_readv", "missing", "the system call is refused, as a sandbox does",
            "a seccomp profile that allows process_vm_readv and process_vm_writev",
        )  # fmt: skip
        return
    scope = host.read("proc/sys/kernel/yama/ptrace_scope")
    if scope in (None, "0"):
        yield Finding("process_vm_readv", "OK", "processes of one user may read each other")
    else:
        yield Finding(
            "process_vm_readv", "degraded", f"ptrace_scope is {_PTRACE.get(str(scope), scope)}",
            "sysctl -w kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE",
        )  # fmt: skip


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _can_read_itself(host: Host) -> bool:
    libc = host.load("libc.so.6")
    if libc is None:
        return False
    source, copy = ctypes.create_string_buffer(b"moonpool"), ctypes.create_string_buffer(8)
    remote = _Iovec(ctypes.addressof(source), 8)
    local = _Iovec(ctypes.addressof(copy), 8)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    read = libc.process_vm_readv(
        os.getpid(), ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    return bool(read == 8) and copy.raw == b"moonpool"


#: In the order of the report.
SAME_HOST_CHECKS: Final[tuple[Callable[[Host], Iterator[Finding]], ...]] = (
    _hugepages,
    _shared_hugepages,
    _memfd,
    _maps,
    _process_vm,
)
