# SPDX-License-Identifier: Apache-2.0
"""What one host says about itself ahead of the check, and whether the devices that were named can be used."""

from __future__ import annotations

import datetime
import re
import subprocess
from dataclasses import asdict
from typing import Any, Final

from moonpool.bench import doctor
from moonpool.bench.errors import BenchError
from moonpool.bench.examined import Host
from moonpool.bench.rails import find_rails

__all__ = ["examine"]

#: For a program that says what it is.
_PATIENCE_S: Final = 20.0


def examine(devices: str | None) -> dict[str, Any]:
    """Return what the doctor says, and the rails that these devices make.

    Args:
        devices: as in the setting ``rdma_devices``; None: every active port.

    Raises:
        MoonpoolError: this host has no RDMA or not those devices, or none of their ports can be used.
    """
    rails = find_rails(devices)
    if not any(rail.up for rail in rails):
        reasons = "; ".join(f"{rail.name}: {rail.reason}" for rail in rails)
        raise BenchError(f"no RDMA port can be used: {reasons}", hint="`mooncake-bench doctor`")
    host = Host()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "doctor": doctor.document(doctor.examine(host)),
        "rails": [asdict(rail) for rail in rails],
        "numa_nodes": sum(bool(re.fullmatch(r"node\d+", name)) for name in host.names("sys/devices/system/node")) or 1,
        "locked_memory_bytes": host.limits["memlock"],
        "perftest": _perftest_version(),
        "gpus": _gpus(),
    }


def _said(*command: str) -> str | None:
    """Return what a program prints, or None where it is not there or says nothing of use."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


def _perftest_version() -> str | None:
    said = _said("ib_write_bw", "--version")
    if said is None:
        return None
    version = re.search(r"\d+\.\d[\w.-]*", said)
    return version[0] if version else "unknown"


def _gpus() -> list[str]:
    # No UUID and no serial number.
    said = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    lines = [line.strip() for line in (said or "").splitlines()]
    return [line for line in lines if re.fullmatch(r".+, \d[\d.]*", line)]
