# SPDX-License-Identifier: Apache-2.0
"""The RDMA rails that an engine finds on this host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moonpool.transfer_engine import TransferEngine
from moonpool.transfer_engine.settings import EngineOptions

__all__ = ["Rail", "bytes_by_rail", "find_rails"]


@dataclass(frozen=True)
class Rail:
    """One port of a device, as the engine sees it.

    Attributes:
        device: its name.
        port: its number; the first is 1.
        up: whether it can be used.
        gid: its address, as text.
        gid_index: the place of that address in the table of the port, or None while the port is not up.
        reason: why this address, or why the port cannot be used.
    """

    device: str
    port: int
    up: bool
    gid: str
    gid_index: int | None
    reason: str

    @property
    def name(self) -> str:
        """What statistics and errors call it."""
        return f"{self.device}:{self.port}"

    @property
    def setting(self) -> str:
        """What the setting ``rdma_devices`` has to be for this port and this address alone."""
        return self.name if self.gid_index is None else f"{self.name}@{self.gid_index}"

    @classmethod
    def of(cls, stats: dict[str, Any]) -> Rail:
        """Read one of ``engine.stats()["rails"]``."""
        device, _, port = stats["rail"].rpartition(":")
        index = stats["gid_index"] if stats["up"] else None
        return cls(device, int(port), stats["up"], stats["gid"], index, stats["reason"])


def find_rails(devices: str | None = None) -> list[Rail]:
    """Ask an engine that is opened for it.

    Args:
        devices: as in the setting ``rdma_devices``.

    Raises:
        MoonpoolError: this host has no RDMA, or not those devices.
    """
    options: EngineOptions = {"listen": None, "transports": "rdma,tcp"}
    if devices is not None:
        options["rdma_devices"] = devices
    with TransferEngine("mooncake-bench", **options) as engine:
        return [Rail.of(one) for one in engine.stats()["rails"]]


def bytes_by_rail(engine: TransferEngine) -> dict[str, int]:
    """Return what each rail of an engine has carried, both ways."""
    return {rail["rail"]: rail["read_bytes"] + rail["written_bytes"] for rail in engine.stats()["rails"]}
