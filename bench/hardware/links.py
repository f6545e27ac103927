# SPDX-License-Identifier: Apache-2.0
"""Takes the link of a rail down and up again, or has a person do it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonpool.address import Address
from moonpool.bench.errors import BenchError
from moonpool.bench.examined import Host
from moonpool.bench.rails import Rail
from moonpool.bench.rdma_host import INFINIBAND, RdmaDevice, RdmaPort, has_capability, rdma_devices

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ByHand", "Link", "Switch", "netdev_of", "why_not"]

_CAP_NET_ADMIN: Final = 12
_COMMAND_S: Final = 20.0
_POLL_S: Final = 0.1


def netdev_of(host: Host, rail: Rail) -> str | None:
    """Return the network device that has the address of a rail, or None."""
    return host.read(f"{INFINIBAND}/{rail.device}/ports/{rail.port}/gid_attrs/ndevs/{rail.gid_index}") or None


def why_not(host: Host, rail: Rail, target: Address, *, careful: bool) -> str:
    """Return why the link of a rail cannot be taken down from here, or ``""``.

    Args:
        host: this one.
        rail: one of its rails.
        target: the other side; what is said to it must not go over the link.
        careful: refuse as well what may cut this host off for others.
    """
    netdev = netdev_of(host, rail)
    port = _port(rdma_devices(host, rail.device), rail)
    by_hand = "; --drill manual waits for somebody to take it down"
    if port is None or netdev is None or port.link_layer == "InfiniBand":
        return f"{rail.name} has no Ethernet link that this host could take down{by_hand}"
    if below := [name.removeprefix("lower_") for name in host.names(f"sys/class/net/{netdev}") if "lower_" in name]:
        return f"{netdev} is on top of {', '.join(below)}: the port would stay up{by_hand}"
    if not has_capability(host, _CAP_NET_ADMIN):
        return f"this process may not change {netdev}: it has not CAP_NET_ADMIN, such as in a container{by_hand}"
    if shutil.which("ip") is None:
        return "there is no ip command. Try: apt-get install iproute2"
    addresses = {gid.gid for gid in port.gids if gid.netdev == netdev}
    if _source(target) in addresses:
        return f"{target} is reached over {netdev} itself; name an address of the target on another network"
    if careful and _session_address(host) in addresses:
        return f"this session came in over {netdev} (--drill link takes it down all the same)"
    if careful and _has_default_route(host, netdev):
        return f"the default route goes over {netdev} (--drill link takes it down all the same)"
    return ""


def _port(devices: list[RdmaDevice], rail: Rail) -> RdmaPort | None:
    ports = (port for device in devices if device.device == rail.device for port in device.ports)
    return next((port for port in ports if port.port == rail.port), None)


def _source(target: Address) -> str:
    """Return the address of this host from which the target is reached. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def _session_address(host: Host) -> str:
    """Return the address of this host that the ssh session came to, or ``""``. sudo does not hand the variable on."""
    connection = os.environ.get("SSH_CONNECTION")
    pid = "self"
    while connection is None and pid not in ("0", ""):
        variables = (host.read(f"proc/{pid}/environ") or "").split("\0")
        connection = next((text for text in variables if text.startswith("SSH_CONNECTION=")), None)
        parent = re.search(r"^PPid:\s*(\d+)$", host.read(f"proc/{pid}/status") or "", re.MULTILINE)
        pid = parent[1] if parent else ""
    return "".join((connection or "").split()[2:3])


def _has_default_route(host: Host, netdev: str) -> bool:
    lines = [line.split() for line in (host.read("proc/net/route") or "").splitlines()[1:]]
    if any(fields[0] == netdev and fields[1] == "00000000" for fields in lines):
        return True
    # Destination, the length of its prefix, ..., the device.
    lines = [line.split() for line in (host.read("proc/net/ipv6_route") or "").splitlines()]
    return any(fields[-1] == netdev and fields[:2] == ["0" * 32, "00"] for fields in lines)


class Switch(ABC):
    """Takes a rail down and up. A context manager that leaves the rail as it was."""

    #: Seconds until the port is down, and until it is up.
    patience: tuple[float, float]
    #: Who does it.
    by_hand: bool

    def __init__(self, rail: Rail, host: Host | None = None) -> None:
        self.rail = rail
        self._host = host or Host()

    @abstractmethod
    def down(self) -> None:
        """Take it down, or ask for that."""

    @abstractmethod
    def up(self) -> None:
        """Bring it up, or ask for that. Idempotent."""

    def is_up(self) -> bool:
        """Whether the port can be used, as the kernel sees it."""
        state = self._host.read(f"{INFINIBAND}/{self.rail.device}/ports/{self.rail.port}/state") or ""
        return state.endswith("ACTIVE")

    def wait_up(self) -> bool:
        """Wait until the port is up; False if it did not come in time."""
        end = time.monotonic() + self.patience[1]
        while not self.is_up():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.up()


class Link(Switch):
    """By ``ip link set``.

    Args:
        rail: of this host.
        netdev: its network device.
        note: a file that names the device for as long as it is down, so that whoever finds it can bring it up.
    """

    #: A fast link is trained for many seconds.
    patience = (20.0, 120.0)
    by_hand = False

    def __init__(self, rail: Rail, netdev: str, note: Path) -> None:
        super().__init__(rail)
        self._netdev = netdev
        self._note = note

    def down(self) -> None:
        """Take it down."""
        self._note.write_text(self._netdev + "\n", encoding="ascii")
        self._set("down")

    def up(self) -> None:
        """Bring it up, if it was taken down here."""
        if self._note.exists():
            self._set("up")
            self._note.unlink()

    def _set(self, state: str) -> None:
        done = subprocess.run(
            ["ip", "link", "set", "dev", self._netdev, state],
            capture_output=True, text=True, timeout=_COMMAND_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchError(f"ip link set dev {self._netdev} {state}: {done.stderr.strip()}")


class ByHand(Switch):
    """By somebody who reads what is printed."""

    patience = (180.0, 300.0)
    by_hand = True

    def __init__(self, rail: Rail, netdev: str | None, say: Callable[[str], None]) -> None:
        super().__init__(rail)
        self._netdev = netdev or "DEVICE"
        self._say = say
        self._asked = False

    def down(self) -> None:
        """Ask for that."""
        self._asked = True
        self._say(
            f"Take {self.rail.name} down now: `ip link set dev {self._netdev} down` as root here, its cable, or its "
            f"port at the switch. Waiting for {self.patience[0]:.0f} s."
        )

    def up(self) -> None:
        """Ask for that, where it was asked to take it down."""
        if self._asked and not self.is_up():
            self._say(
                f"Bring {self.rail.name} up again: `ip link set dev {self._netdev} up`. "
                f"Waiting for {self.patience[1]:.0f} s."
            )
        self._asked = False
