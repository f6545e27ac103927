# SPDX-License-Identifier: Apache-2.0
"""Where a process runs: as which user, in which namespaces, and what others may do with it."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")

#: The user that owns nothing.
NOBODY = 65534


def enter(work: Callable[[], T], *, uid: int | None = None, dumpable: bool = True, network: bool = False) -> T:
    """Call `work` as another user, in a process that others may not look into, or in another network namespace."""
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        # The kernel hides a process that changed its user; most programs that do so were started that way.
        _prctl(_PR_SET_DUMPABLE, 1)
    if not dumpable:
        _prctl(_PR_SET_DUMPABLE, 0)
    return _in_network_namespace(work) if network else work()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _in_network_namespace(work: Callable[[], T]) -> T:
    """Call `work` in a thread that keeps the network of this process while the process itself moves to another.

    So its sockets reach the others, and everything that asks for the namespace of the process is told the new one.
    """
    moved, results = threading.Event(), list[T]()

    def run() -> None:
        moved.wait()
        results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    done = _libc.unshare(_CLONE_NEWNET)
    error = ctypes.get_errno()
    moved.set()
    thread.join()
    if done != 0:
        raise OSError(error, "unshare")
    return results[0]


def why_no_unshare(*options: str) -> str:
    """Return why unshare(1) with these options does not work here, or ""."""
    command = shutil.which("unshare")
    if command is None:
        return "there is no unshare(1)"
    done = subprocess.run([command, *options, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def shared_mappings(pid: int | str = "self") -> int:
    """Count the mappings of memory that engines share, those of a process's own regions included."""
    # A region that only a cycle of objects still holds would go in the middle of a comparison.
    gc.collect()
    return sum("/memfd:moonpool (" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
