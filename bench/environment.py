# SPDX-License-Identifier: Apache-2.0
"""Where and with what a run was made: everything one needs to repeat it, or to doubt it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import numpy as np

import moonpool
from moonpool.transfer_engine import EngineSettings

__all__ = ["describe_host", "describe_run"]

#: Settings that the benchmark decides itself, or that change no figure.
_NO_TUNING: Final = frozenset({"name", "listen", "transports", "require", "secret", "insecure"})


def describe_host(root: Path = Path("/")) -> dict[str, Any]:
    """Return what is worth knowing about this machine, as JSON values. What the system does not say is None."""
    return {
        "host": platform.node(),
        "cpu": _cpu_model(root),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(root),
        "kernel": platform.release(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "governor": _line(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "transparent_hugepage": _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "tcp_congestion_control": _line(root / "proc/sys/net/ipv4/tcp_congestion_control"),
        "tcp_rmem": _numbers(root / "proc/sys/net/ipv4/tcp_rmem"),
        "tcp_wmem": _numbers(root / "proc/sys/net/ipv4/tcp_wmem"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "moonpool": moonpool.__version__,
        "revision": _revision(),
    }


def describe_run(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the header of a run: this host, the engine's settings, the parameters.

    Args:
        parameters: of the command, as JSON values.

    Returns:
        A dictionary whose ``target`` is None; what `describe_host` says on another host belongs there.

    Raises:
        ConfigError: a setting in the environment or the settings file is impossible.
    """
    settings = EngineSettings.load({})
    defaults = EngineSettings()
    changed = {
        item.name: value
        for item in dataclasses.fields(settings)
        if item.name not in _NO_TUNING
        if (value := getattr(settings, item.name)) != getattr(defaults, item.name)
    }
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **describe_host(),
        # Set by environment or file: they act on every engine of this machine.
        "engine_settings": changed,
        "parameters": parameters,
        "target": None,
    }


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _line(path: Path) -> str | None:
    text = _read(path)
    return None if text is None else text.strip() or None


def _chosen(path: Path) -> str | None:
    """The word in brackets: ``always [madvise] never``."""
    match = re.search(r"\[(\S+)\]", _read(path) or "")
    return match[1] if match else None


def _numbers(path: Path) -> list[int] | None:
    text = _read(path)
    return None if text is None else [int(number) for number in text.split()]


def _cpu_model(root: Path) -> str | None:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo") or "", re.MULTILINE)
    return match[1].strip() if match else platform.processor() or None


def _memory_bytes(root: Path) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB$", _read(root / "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _revision() -> str | None:
    """The git revision of the sources around this file, with a + when they were changed; None when installed."""
    here = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
