# SPDX-License-Identifier: Apache-2.0
"""Where the doctor looks, and what it finds."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moonpool.bench.rails import Rail, find_rails
from moonpool.transfer_engine import TransportInfo, probe

__all__ = ["Finding", "Host", "Status"]

Status = Literal["OK", "degraded", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: ``OK``, ``degraded`` (works, but slower or for fewer than it could) or ``missing``.
        found: what is there.
        fix: what to do about it, or ``""``.
        needed: transfers are impossible without it.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    needed: bool = False


def _loaded(library: str) -> ctypes.CDLL | None:
    if library == "libcuda.so.1":
        library = os.environ.get("MOONPOOL_CUDA_LIBRARY") or library  # as the engine does
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _limits() -> dict[str, int]:
    return {
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


@dataclass(frozen=True)
class Host:
    """Where the doctor looks. Tests give it another one.

    Attributes:
        root: in place of ``/``.
        transports: what the engine says.
        rails: what the engine makes of the RDMA devices.
        limits: soft limits of this process: ``nofile``, ``memlock``; -1 is unlimited.
        load: opens a shared library, or returns None.
        cores: CPUs this process may use.
    """

    root: Path = Path("/")
    transports: Callable[[], list[TransportInfo]] = probe
    rails: Callable[[], list[Rail]] = find_rails
    limits: dict[str, int] = field(default_factory=_limits)
    load: Callable[[str], ctypes.CDLL | None] = _loaded
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def read(self, path: str) -> str | None:
        """Return the text of a file of the system without its last line break, or None where it is not there."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def read_bytes(self, path: str) -> bytes:
        """Return as much of a file of the system as this process may read, or nothing."""
        try:
            return (self.root / path).read_bytes()
        except OSError:
            return b""

    def steps(self, path: str) -> list[str]:
        """Return the way from the host bridge to the PCI device that a link of the system leads to, or nothing."""
        parts = (self.root / path).resolve().parts
        first = next((at for at, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
        return [] if first is None or not (self.root / path).exists() else list(parts[first:])

    def pointed_to(self, path: str) -> str | None:
        """Return the name of what a link of the system leads to, or None where there is no link."""
        link = self.root / path
        return link.resolve().name if link.is_symlink() else None

    def names(self, path: str) -> list[str]:
        """Return the entries of a folder of the system, sorted; none where it is not there."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []
