# SPDX-License-Identifier: Apache-2.0
"""Whether the host has the memory that a node is to lend. The kernel gives any address space, and kills later."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from moonpool.errors import ConfigError
from moonpool.units import format_bytes

__all__ = ["check_dram"]

_log = logging.getLogger("moonpool.node")
_MEMINFO: Final = Path("/proc/meminfo")


def check_dram(dram: int, meminfo: Path = _MEMINFO) -> None:
    """Refuse to lend more than the host has, and warn of more than it has left.

    Args:
        dram: bytes to lend.
        meminfo: what the kernel says of its memory.

    Raises:
        ConfigError: it is more than all of the memory.
    """
    try:
        found = _read(meminfo)
    except (OSError, ValueError) as error:
        _log.warning("how much memory this host has is not known: %s", error)
        return
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    if total is not None and dram > total:
        raise ConfigError(
            f"dram is {format_bytes(dram)}, and this host has {total / (1 << 30):.1f} GiB",
            hint="less than that, with room for everything else that runs here",
        )
    if available is not None and dram > available:
        _log.warning(
            "dram is %s, and %.1f GiB are available: as the pool fills, the kernel will end processes",
            format_bytes(dram),
            available / (1 << 30),
        )


def _read(meminfo: Path) -> dict[str, int]:
    """Return bytes by name."""
    found = {}
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(amount.split()[0]) * 1024
    return found
