# SPDX-License-Identifier: Apache-2.0
"""What this host offers to transfers, what holds it back, and how to repair that: ``mooncake-bench doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any, Final

from moonpool.bench.environment import describe_host
from moonpool.bench.examined import Finding, Host
from moonpool.bench.gpu_host import GPU_CHECKS, gpus
from moonpool.bench.rdma_host import RDMA_CHECKS, rdma_devices, rdma_fix
from moonpool.bench.same_host import SAME_HOST_CHECKS
from moonpool.errors import ConfigError
from moonpool.transfer_engine import EngineSettings
from moonpool.units import format_bytes

__all__ = ["Finding", "Host", "document", "examine", "healthy"]

_FILES_MIN: Final = 4096
_BUFFER_BYTES_MIN: Final = 4 << 20
_BACKLOG_MIN: Final = 1024


def examine(host: Host | None = None) -> list[Finding]:
    """Look at everything."""
    host = host or Host()
    return [finding for check in _CHECKS for finding in check(host)]


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing that transfers need is missing."""
    return not any(finding.needed and finding.status == "missing" for finding in findings)


def document(findings: list[Finding]) -> dict[str, Any]:
    """Return the JSON form, documented in ``docs/bench.md``."""
    return {
        "schema": 1,
        "environment": describe_host(),
        "healthy": healthy(findings),
        "checks": [
            {name: getattr(finding, name) for name in ("name", "status", "found", "fix", "needed")}
            for finding in findings
        ],
        "rdma": [asdict(device) for device in rdma_devices(Host())],
        "gpus": [asdict(gpu) for gpu in gpus(Host())],
    }


# ---------------------------------------------------------------- checks, in the order of the report


def _transports(host: Host) -> Iterator[Finding]:
    for transport in host.transports():
        name = f"transport {transport.name}"
        needed = transport.name == "tcp"
        if transport.available:
            yield Finding(name, "OK", transport.reason or "available", needed=needed)
        else:
            fix = rdma_fix(host) if transport.name == "rdma" else ""
            yield Finding(name, "missing", transport.reason or "not available", fix, needed=needed)


def _settings(host: Host) -> Iterator[Finding]:
    try:
        settings = EngineSettings.load({})
    except ConfigError as error:
        yield Finding("settings", "missing", error.message, error.hint or "", needed=True)
        return
    defaults = EngineSettings()
    names = [item.name for item in fields(settings)]
    changed = ", ".join(name for name in names if getattr(settings, name) != getattr(defaults, name))
    yield Finding("settings", "OK", f"set here: {changed}" if changed else "defaults")


def _cores(host: Host) -> Iterator[Finding]:
    if host.cores >= 2:
        yield Finding("CPU cores", "OK", str(host.cores))
    else:
        yield Finding(
            "CPU cores", "degraded", "1: sender and receiver take turns",
            "a larger CPU share: taskset, cpuset, or the container's CPU limit",
        )  # fmt: skip


def _governor(host: Host) -> Iterator[Finding]:
    governor = host.read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor is None:
        return  # decided outside of this machine: most virtual ones
    if governor == "performance":
        yield Finding("CPU governor", "OK", governor)
    else:
        yield Finding("CPU governor", "degraded", f"{governor}: figures vary with the clock",
                      "cpupower frequency-set -g performance")  # fmt: skip


def _numa(host: Host) -> Iterator[Finding]:
    nodes = [name for name in host.names("sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) <= 1:
        yield Finding("NUMA nodes", "OK", "1")
    elif host.read("proc/sys/kernel/numa_balancing") not in (None, "0"):
        yield Finding(
            "NUMA nodes", "degraded", f"{len(nodes)}, and the kernel moves pages between them (numa_balancing)",
            "sysctl -w kernel.numa_balancing=0",
        )  # fmt: skip
    else:
        yield Finding("NUMA nodes", "OK", f"{len(nodes)}; numactl keeps a process and its memory on one of them")


def _open_files(host: Host) -> Iterator[Finding]:
    files = host.limits["nofile"]
    if files == -1 or files >= _FILES_MIN:
        yield Finding("open files", "OK", "unlimited" if files == -1 else f"{files} (ulimit -n)")
    else:
        yield Finding("open files", "degraded", f"{files} (ulimit -n): every peer takes several",
                      "ulimit -n 65536, or LimitNOFILE=65536 in the unit")  # fmt: skip


def _socket_buffers(host: Host) -> Iterator[Finding]:
    for name, default in (("tcp_rmem", "4096 131072 6291456"), ("tcp_wmem", "4096 16384 4194304")):
        text = host.read(f"proc/sys/net/ipv4/{name}")
        numbers = [int(number) for number in (text or "").split()]
        if len(numbers) != 3:
            continue  # another network namespace may hide it
        if numbers[2] >= _BUFFER_BYTES_MIN:
            yield Finding(f"socket buffers {name}", "OK", f"up to {format_bytes(numbers[2])}")
        else:
            yield Finding(
                f"socket buffers {name}", "degraded", f"up to {format_bytes(numbers[2])}: long fast paths stay empty",
                f'sysctl -w net.ipv4.{name}="{default}"',
            )  # fmt: skip


def _backlog(host: Host) -> Iterator[Finding]:
    text = host.read("proc/sys/net/core/somaxconn")
    if text is None:
        return
    if int(text) >= _BACKLOG_MIN:
        yield Finding("connection backlog", "OK", f"{text} (somaxconn)")
    else:
        yield Finding("connection backlog", "degraded", f"{text} (somaxconn): many peers at once wait for retries",
                      "sysctl -w net.core.somaxconn=4096")  # fmt: skip


_CHECKS: Final = (
    _transports,
    _settings,
    _cores,
    _governor,
    _numa,
    _open_files,
    _socket_buffers,
    _backlog,
    *SAME_HOST_CHECKS,
    *RDMA_CHECKS,
    *GPU_CHECKS,
)
