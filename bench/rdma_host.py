# SPDX-License-Identifier: Apache-2.0
"""What transfers over RDMA need, for the doctor: devices, ports, addresses, and memory that may be locked.

Which address a port uses is the engine's choice, and so it is asked; the rest is the kernel's and libibverbs' word.
"""

from __future__ import annotations

import ctypes
import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from moonpool.bench.examined import Finding, Host, Status
from moonpool.bench.rails import Rail
from moonpool.errors import MoonpoolError
from moonpool.units import format_bytes

__all__ = [
    "INFINIBAND",
    "RDMA_CHECKS",
    "RdmaDevice",
    "RdmaGid",
    "RdmaPort",
    "has_capability",
    "rdma_devices",
    "rdma_fix",
]

#: Where the kernel lists the devices.
INFINIBAND: Final = "sys/class/infiniband"
_VERBS: Final = "libibverbs.so.1"
#: enum ibv_mtu
_MTU: Final = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
_CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True)
class RdmaGid:
    """One row of the table of addresses of a port.

    Attributes:
        index: its place.
        gid: the address, as text.
        kind: ``RoCE v2``, ``IB/RoCE v1``.
        netdev: the network device that has the address, or None.
        chosen: whether the engine uses it.
    """

    index: int
    gid: str
    kind: str | None
    netdev: str | None
    chosen: bool


@dataclass(frozen=True)
class RdmaPort:
    """One port of a device.

    Attributes:
        port: its number.
        state: ``ACTIVE``, ``DOWN``, ...
        physical_state: ``LinkUp``, ``Polling``, ``Disabled``, ...
        link_layer: ``Ethernet`` or ``InfiniBand``.
        rate: such as ``400 Gb/sec (4X NDR)``.
        mtu: bytes of a packet, or None where libibverbs does not tell.
        mtu_max: what the port could have.
        gids: its addresses.
        up: whether the engine can use it.
        reason: what the engine says about it.
    """

    port: int
    state: str
    physical_state: str | None
    link_layer: str | None
    rate: str | None
    mtu: int | None
    mtu_max: int | None
    gids: list[RdmaGid]
    up: bool
    reason: str


@dataclass(frozen=True)
class RdmaDevice:
    """One device.

    Attributes:
        device: its name.
        firmware: its version, or None where there is none.
        pci: its place on the bus, or None for a virtual device.
        numa_node: where it is attached, or None where that makes no difference.
        opened: whether libibverbs opens it.
        ports: its ports.
    """

    device: str
    firmware: str | None
    pci: str | None
    numa_node: int | None
    opened: bool
    ports: list[RdmaPort] = field(default_factory=list)


def rdma_devices(host: Host, only: str | None = None) -> list[RdmaDevice]:
    """Return what is known of every device that the kernel has, or of the one with this name."""
    names = [name for name in host.names(INFINIBAND) if only in (None, name)]
    if not names:
        return []
    try:
        rails = {(rail.device, rail.port): rail for rail in host.rails()}
        problem = "the engine does not see it"
    except MoonpoolError as error:
        rails, problem = {}, str(error)
    mtus = _ask_verbs(host)
    devices = []
    for name in names:
        node = host.read(f"{INFINIBAND}/{name}/device/numa_node")
        firmware = host.read(f"{INFINIBAND}/{name}/fw_ver")
        devices.append(
            RdmaDevice(
                name,
                None if firmware in ("0.0.0", "") else firmware,
                host.pointed_to(f"{INFINIBAND}/{name}/device"),
                None if node is None or int(node) < 0 else int(node),
                name in mtus,
                [
                    _port(host, name, int(port), rails.get((name, int(port))), problem, mtus.get(name, {}))
                    for port in sorted(host.names(f"{INFINIBAND}/{name}/ports"), key=int)
                ],
            )
        )
    return devices


def _port(
    host: Host, device: str, port: int, rail: Rail | None, problem: str, mtus: dict[int, tuple[int, int]]
) -> RdmaPort:
    folder = f"{INFINIBAND}/{device}/ports/{port}"
    # The number of the state stands before its name.
    state, physical = ((host.read(f"{folder}/{name}") or "").rpartition(": ")[2] for name in ("state", "phys_state"))
    mtu, mtu_max = mtus.get(port, (None, None))
    return RdmaPort(
        port,
        state or "unknown",
        physical or None,
        host.read(f"{folder}/link_layer"),
        host.read(f"{folder}/rate"),
        mtu,
        mtu_max,
        list(_gids(host, folder, None if rail is None or not rail.up else rail.gid_index)),
        rail is not None and rail.up,
        problem if rail is None else rail.reason,
    )


def _gids(host: Host, folder: str, chosen: int | None) -> Iterator[RdmaGid]:
    for index in sorted(map(int, host.names(f"{folder}/gids"))):
        try:
            address = ipaddress.IPv6Address(host.read(f"{folder}/gids/{index}") or "::")
        except ValueError:
            continue
        # Of an empty place, at most the prefix is there.
        if int(address) & ((1 << 64) - 1):
            yield RdmaGid(
                index,
                str(address.ipv4_mapped or address),
                host.read(f"{folder}/gid_attrs/types/{index}"),
                host.read(f"{folder}/gid_attrs/ndevs/{index}"),
                index == chosen,
            )


def _ask_verbs(host: Host) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the MTU of every port and the largest it could have, by device: of those that can be opened."""
    verbs = host.load(_VERBS)
    if verbs is None:
        return {}
    found: dict[str, dict[int, tuple[int, int]]] = {}
    count = ctypes.c_int(0)
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("ibv_get_device_list", ctypes.POINTER(pointer), [ctypes.POINTER(ctypes.c_int)]),
        ("ibv_free_device_list", None, [ctypes.POINTER(pointer)]),
        ("ibv_get_device_name", ctypes.c_char_p, [pointer]),
        ("ibv_open_device", pointer, [pointer]),
        ("ibv_close_device", ctypes.c_int, [pointer]),
        ("ibv_query_port", ctypes.c_int, [pointer, ctypes.c_uint8, pointer]),
    ):
        function = getattr(verbs, name)
        function.restype, function.argtypes = result, arguments
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return {}
    for index in range(count.value):
        context = verbs.ibv_open_device(devices[index])
        if not context:
            continue
        name = verbs.ibv_get_device_name(devices[index]).decode()
        found[name] = {}
        for port in map(int, host.names(f"{INFINIBAND}/{name}/ports")):
            # struct ibv_port_attr begins with state, max_mtu, active_mtu; there is room for what follows.
            attributes = (ctypes.c_int * 64)()
            if verbs.ibv_query_port(context, port, ctypes.addressof(attributes)) == 0:
                found[name][port] = _MTU.get(attributes[2], 0), _MTU.get(attributes[1], 0)
        verbs.ibv_close_device(context)
    verbs.ibv_free_device_list(devices)
    return found


def rdma_fix(host: Host) -> str:
    """Return what to do where the engine finds no RDMA, or ``""`` where there is nothing to repair."""
    if host.load(_VERBS) is None:
        return "apt-get install libibverbs1 ibverbs-providers"
    if host.names(INFINIBAND):
        return "--device=/dev/infiniband for the container, and the provider package (ibverbs-providers)"
    return ""


# ---------------------------------------------------------------- findings, in the order of the report


def _devices(host: Host) -> Iterator[Finding]:
    for device in rdma_devices(host):
        where = [
            "virtual: on no bus" if device.pci is None else f"PCI {device.pci}",
            None if device.numa_node is None else f"NUMA node {device.numa_node}",
            None if device.firmware is None else f"firmware {device.firmware}",
        ]
        found = ", ".join(part for part in where if part)
        name = f"RDMA {device.device}"
        if device.opened:
            yield Finding(name, "OK", found)
        else:
            yield Finding(name, "degraded", f"{found}; libibverbs does not open it", rdma_fix(host))
        for port in device.ports:
            yield _port_finding(f"{name}:{port.port}", port)


def _port_finding(name: str, port: RdmaPort) -> Finding:
    parts = [port.state, port.physical_state, port.rate, port.link_layer]
    if port.mtu:
        parts.append(f"MTU {port.mtu}" if port.mtu == port.mtu_max else f"MTU {port.mtu} of {port.mtu_max}")
    lines = [", ".join(part for part in parts if part)]
    status: Status = "OK"
    fix = ""
    if port.state != "ACTIVE":
        status, fix = "degraded", "cable, switch port and `ip link set up`; for Soft-RoCE `rdma link`"
    elif not port.up:
        status, fix = "degraded", "an address on its network device; rdma_devices=NAME:PORT@GID_INDEX chooses another"
        lines.append(f"not used: {port.reason}")
    else:
        if port.mtu and port.mtu_max and port.mtu < port.mtu_max and port.link_layer == "Ethernet":
            netdev = next((gid.netdev for gid in port.gids if gid.chosen and gid.netdev), "DEVICE")
            status = "degraded"
            fix = f"ip link set dev {netdev} mtu {port.mtu_max + 104} on both ends, and room for it at the switch"
        lines.append(f"chosen: GID {port.reason}")
    for gid in port.gids:
        about = ", ".join(part for part in (gid.kind, gid.netdev) if part)
        lines.append(f"{'>' if gid.chosen else ' '} {gid.index}  {gid.gid}" + (f"  ({about})" if about else ""))
    return Finding(name, status, "\n".join(lines), fix)


def _memlock(host: Host) -> Iterator[Finding]:
    name = "locked memory"
    limit = host.limits["memlock"]
    if limit == -1:
        yield Finding(name, "OK", "unlimited")
    elif not host.names(INFINIBAND):
        yield Finding(name, "OK", f"{format_bytes(limit)} (ulimit -l); nothing here locks memory")
    elif has_capability(host, _CAP_IPC_LOCK):
        yield Finding(name, "OK", f"{format_bytes(limit)} (ulimit -l), which does not bind this process (CAP_IPC_LOCK)")
    else:
        yield Finding(
            name, "degraded",
            f"{format_bytes(limit)} (ulimit -l): registered memory is locked, and RDMA takes no more than that",
            "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1 for the container",
        )  # fmt: skip


def has_capability(host: Host, number: int) -> bool:
    """Whether this process has one of the capabilities of ``linux/capability.h``."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", host.read("proc/self/status") or "", re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> number & 1)


RDMA_CHECKS: Final[tuple[Callable[[Host], Iterator[Finding]], ...]] = (_memlock, _devices)
