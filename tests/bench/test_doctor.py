# SPDX-License-Identifier: Apache-2.0
"""The doctor on machines that are not this one."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from moonpool.bench import commands, doctor
from moonpool.bench.doctor import examine, healthy
from moonpool.bench.errors import ExitStatus
from moonpool.bench.examined import Finding, Host
from moonpool.bench.rails import Rail
from moonpool.bench.report import doctor_table
from moonpool.transfer_engine import TransportInfo

TRANSPORTS = [TransportInfo("local", True, ""), TransportInfo("tcp", True, "sockets; always there")]
GOOD = {
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/devices/system/node/node0/cpulist": "0-7",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
    "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
    "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304",
    "proc/sys/net/core/somaxconn": "4096",
    "proc/sys/kernel/yama/ptrace_scope": "0",
    "proc/sys/vm/max_map_count": "65530",
}

Patient = Callable[..., dict[str, Finding]]


class Verbs:
    """As much of libibverbs as the doctor uses.

    Args:
        ports: by device, the MTU of its port and the largest that is possible, as in ``enum ibv_mtu``; None: the device
            cannot be opened.
    """

    class _Function:
        restype: Any = None
        argtypes: Any = None

        def __init__(self, function: Callable[..., Any]) -> None:
            self._function = function

        def __call__(self, *arguments: Any) -> Any:
            return self._function(*arguments)

    def __init__(self, **ports: tuple[int, int] | None) -> None:
        self._ports = list(ports.items())
        self.ibv_get_device_list = self._Function(self._list)
        self.ibv_free_device_list = self._Function(lambda devices: None)
        self.ibv_get_device_name = self._Function(lambda device: self._ports[device - 1][0].encode())
        self.ibv_open_device = self._Function(lambda device: device if self._ports[device - 1][1] else None)
        self.ibv_close_device = self._Function(lambda context: 0)
        self.ibv_query_port = self._Function(self._query)
        self.ibv_reg_dmabuf_mr = self._Function(lambda: None)

    def _list(self, count: Any) -> list[int]:
        count._obj.value = len(self._ports)
        return [index + 1 for index in range(len(self._ports))]

    def _query(self, context: int, port: int, attributes: int) -> int:
        active, largest = self._ports[context - 1][1] or (0, 0)
        (ctypes.c_int * 3).from_address(attributes)[:] = [4, largest, active]
        return 0


class Cuda:
    """As much of libcuda as the doctor uses."""

    def __init__(self, *names: bytes, problem: int = 0) -> None:
        self._names = names
        self._problem = problem

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._problem

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._names)
        return 0

    def cuDeviceGetName(self, name: Any, length: Any, device: Any) -> int:  # noqa: N802
        name.value = self._names[device.value]
        return 0

    def cuDeviceGetPCIBusId(self, name: Any, length: Any, device: Any) -> int:  # noqa: N802
        name.value = b"0000:%d1:00.0" % (4 + device.value)
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: Any, device: Any) -> int:  # noqa: N802
        value._obj.value = {124: device.value == 0, 118: 100}[which.value]
        return 0


@pytest.fixture
def patient(tmp_path: Path) -> Patient:
    """Examine a machine that is fine but for what is given: files by path (None: not there), limits, libraries."""

    def examined(
        files: dict[str, str | None] | None = None,
        *,
        limits: dict[str, int] | None = None,
        libraries: dict[str, Any] | None = None,
        transports: list[TransportInfo] = TRANSPORTS,
        rails: list[Rail] | None = None,
        cores: int = 8,
    ) -> dict[str, Finding]:
        for name, text in (GOOD | (files or {})).items():
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text + "\n", encoding="utf-8")
        there = {"libc.so.6": ctypes.CDLL(None)} | (libraries or {})
        host = Host(
            root=tmp_path,
            transports=lambda: transports,
            rails=lambda: rails or [],
            limits={"nofile": 65536, "memlock": -1} | (limits or {}),
            load=there.get,
            cores=cores,
        )
        return {finding.name: finding for finding in examine(host)}

    return examined


def test_a_good_machine_needs_nothing(patient: Patient) -> None:
    findings = patient(libraries={"libibverbs.so.1": Verbs(), "libcuda.so.1": Cuda(b"NVIDIA H200")})
    assert [name for name, finding in findings.items() if finding.status != "OK"] == []
    assert findings["GPU 0"].found.startswith("NVIDIA H200\n")
    assert not [finding for finding in findings.values() if finding.status == "OK" and finding.fix]


@pytest.mark.parametrize(
    ("files", "name", "found", "fix"),
    [
        ({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "transparent huge pages", "never",
         "echo madvise"),
        ({"sys/kernel/mm/transparent_hugepage/enabled": None}, "transparent huge pages", "not in this kernel", ""),
        ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, "CPU governor", "powersave",
         "cpupower"),
        ({"proc/sys/net/ipv4/tcp_rmem": "4096 87380 212992"}, "socket buffers tcp_rmem", "208KiB", "net.ipv4.tcp_rmem"),
        ({"proc/sys/net/ipv4/tcp_wmem": "4096 16384 65536"}, "socket buffers tcp_wmem", "64KiB", "net.ipv4.tcp_wmem"),
        ({"proc/sys/net/core/somaxconn": "128"}, "connection backlog", "128", "net.core.somaxconn"),
        ({"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force"},
         "shared huge pages", "never", "echo advise"),
        ({"proc/sys/vm/max_map_count": "1024"}, "memory mappings", "1024", "vm.max_map_count=65530"),
        ({"proc/sys/kernel/yama/ptrace_scope": "1"}, "process_vm_readv", "only a parent", "ptrace_scope=0"),
        ({"proc/sys/kernel/yama/ptrace_scope": "3"}, "process_vm_readv", "nobody", "CAP_SYS_PTRACE"),
        ({"sys/devices/system/node/node1/cpulist": "8-15", "proc/sys/kernel/numa_balancing": "1"}, "NUMA nodes",
         "2, and the kernel moves pages", "numa_balancing=0"),
    ],
)  # fmt: skip
def test_what_holds_back_is_degraded_and_says_how_to_repair_it(
    patient: Patient, files: dict[str, str | None], name: str, found: str, fix: str
) -> None:
    finding = patient(files)[name]
    assert finding.status == "degraded"
    assert found in finding.found
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)


def test_what_the_system_does_not_show_is_left_out(patient: Patient) -> None:
    findings = patient(dict.fromkeys(GOOD))
    assert "CPU governor" not in findings
    assert "connection backlog" not in findings
    assert "memory mappings" not in findings
    assert "shared huge pages" not in findings
    assert findings["NUMA nodes"].status == "OK"
    assert findings["process_vm_readv"].status == "OK", "no Yama: nothing is restricted"


def test_limits_of_the_process(patient: Patient) -> None:
    findings = patient(limits={"nofile": 1024, "memlock": 64 << 10}, cores=1)
    assert (findings["open files"].status, "65536" in findings["open files"].fix) == ("degraded", True)
    assert findings["locked memory"].found.startswith("64KiB")
    assert findings["locked memory"].status == "OK", "nothing here locks memory"
    assert findings["CPU cores"].status == "degraded"
    assert patient(limits={"nofile": -1})["open files"].found == "unlimited"


PORT = "sys/class/infiniband/mlx5_0/ports/1"
RDMA: dict[str, str | None] = {
    "sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002",
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/phys_state": "5: LinkUp",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)",
    f"{PORT}/link_layer": "Ethernet",
    f"{PORT}/gids/0": "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001",
    f"{PORT}/gid_attrs/types/0": "IB/RoCE v1",
    f"{PORT}/gid_attrs/ndevs/0": "eth2",
    f"{PORT}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0007",
    f"{PORT}/gid_attrs/types/3": "RoCE v2",
    f"{PORT}/gid_attrs/ndevs/3": "eth2",
    f"{PORT}/gids/4": "fe80:0000:0000:0000:0000:0000:0000:0000",
    f"{PORT}/gids/10": "0000:0000:0000:0000:0000:0000:0000:0000",
    "proc/sys/kernel/osrelease": "6.8.0-45-generic",
}
CHOSEN = "index 3, 10.0.0.7 (RoCE v2, IPv4), the best of 2"
RAIL = Rail("mlx5_0", 1, True, "10.0.0.7", 3, CHOSEN)
VERBS = {"libibverbs.so.1": Verbs(mlx5_0=(5, 5))}


def test_rdma_devices_and_their_ports(patient: Patient, tmp_path: Path) -> None:
    bus = tmp_path / "sys/devices/pci0000:37/0000:3b:00.0"
    bus.mkdir(parents=True)
    (bus / "numa_node").write_text("1\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").symlink_to(bus)
    findings = patient(RDMA, libraries=VERBS, rails=[RAIL])
    assert findings["RDMA mlx5_0"] == Finding(
        "RDMA mlx5_0", "OK", "PCI 0000:3b:00.0, NUMA node 1, firmware 28.39.1002"
    )  # fmt: skip
    port = findings["RDMA mlx5_0:1"]
    assert (port.status, port.fix) == ("OK", "")
    assert port.found.splitlines() == [
        "ACTIVE, LinkUp, 400 Gb/sec (4X NDR), Ethernet, MTU 4096",
        f"chosen: GID {CHOSEN}",
        "  0  fe80::ba3f:d2ff:fe00:1  (IB/RoCE v1, eth2)",
        "> 3  10.0.0.7  (RoCE v2, eth2)",
    ]


def test_a_virtual_device_is_on_no_bus(patient: Patient) -> None:
    findings = patient(RDMA | {"sys/class/infiniband/mlx5_0/fw_ver": "0.0.0"}, libraries=VERBS, rails=[RAIL])
    assert findings["RDMA mlx5_0"].found == "virtual: on no bus"


def test_a_port_that_is_down(patient: Patient) -> None:
    rail = Rail("mlx5_0", 1, False, "10.0.0.7", None, "the port is PORT_DOWN")
    port = patient(RDMA | {f"{PORT}/state": "1: DOWN"}, libraries=VERBS, rails=[rail])["RDMA mlx5_0:1"]
    assert (port.status, "ip link set up" in port.fix) == ("degraded", True)
    assert "chosen" not in port.found
    assert ">" not in port.found


def test_a_port_without_an_address(patient: Patient) -> None:
    rail = Rail("mlx5_0", 1, False, "::", None, "the port has no GID; give its network device an address")
    port = patient(RDMA, libraries=VERBS, rails=[rail])["RDMA mlx5_0:1"]
    assert (port.status, "an address" in port.fix) == ("degraded", True)
    assert "not used: the port has no GID" in port.found


def test_a_small_mtu_says_which_device_to_change(patient: Patient) -> None:
    port = patient(RDMA, libraries={"libibverbs.so.1": Verbs(mlx5_0=(3, 5))}, rails=[RAIL])["RDMA mlx5_0:1"]
    assert (port.status, "MTU 1024 of 4096" in port.found) == ("degraded", True)
    assert "ip link set dev eth2 mtu 4200" in port.fix


def test_rdma_that_cannot_be_used_says_why(patient: Patient) -> None:
    transports = [*TRANSPORTS, TransportInfo("rdma", False, "why the engine cannot")]
    without = patient(transports=transports)
    assert "apt-get install libibverbs1" in without["transport rdma"].fix
    assert without["transport rdma"].found == "why the engine cannot"
    nothing = patient(transports=transports, libraries={"libibverbs.so.1": Verbs()})["transport rdma"]
    assert (nothing.status, nothing.fix) == ("missing", "")
    hidden = patient(RDMA, transports=transports, libraries={"libibverbs.so.1": Verbs(mlx5_0=None)})
    assert "--device=/dev/infiniband" in hidden["transport rdma"].fix
    assert "libibverbs does not open it" in hidden["RDMA mlx5_0"].found
    assert "not used: the engine does not see it" in hidden["RDMA mlx5_0:1"].found


def test_memory_that_may_be_locked(patient: Patient) -> None:
    small = {"memlock": 8 << 20}
    finding = patient(RDMA, limits=small, libraries=VERBS)["locked memory"]
    assert (finding.status, "--ulimit memlock=-1" in finding.fix) == ("degraded", True)
    assert "RDMA takes no more than that" in finding.found
    trusted = patient(RDMA | {"proc/self/status": "CapEff:\t0000000000004000"}, limits=small, libraries=VERBS)
    assert (trusted["locked memory"].status, "CAP_IPC_LOCK" in trusted["locked memory"].found) == ("OK", True)


@pytest.mark.parametrize(
    ("files", "status", "found"),
    [
        ({}, "OK", "no NVIDIA driver"),
        ({"sys/module/nvidia/version": "570.1"}, "OK", "dma-buf: in kernel 6.8"),
        ({"sys/module/nvidia/version": "570.1"}, "OK", "in libibverbs"),
        ({"sys/module/nvidia/version": "570.1", "proc/sys/kernel/osrelease": "5.4.0-1"}, "degraded", "main memory"),
        ({"sys/module/nvidia/version": "570.1", "proc/sys/kernel/osrelease": "5.4.0-1",
          "sys/module/nvidia_peermem/version": "570.1"}, "OK", "nvidia_peermem: loaded"),
    ],
)  # fmt: skip
def test_how_a_device_reaches_gpu_memory(patient: Patient, files: dict[str, str], status: str, found: str) -> None:
    finding = patient(RDMA | files, libraries=VERBS, rails=[RAIL])["GPU memory over RDMA"]
    assert (finding.status, found in finding.found) == (status, True)


def test_gpus(patient: Patient) -> None:
    assert "libcuda is not here" in patient()["GPU"].found
    assert "cuInit says 100" in patient(libraries={"libcuda.so.1": Cuda(problem=100)})["GPU"].found
    assert "no device is visible" in patient(libraries={"libcuda.so.1": Cuda()})["GPU"].found
    assert {"GPU 0", "GPU 1"} < set(patient(libraries={"libcuda.so.1": Cuda(b"A", b"B")}))


def test_where_a_gpu_is_and_which_nic_is_near(patient: Patient, tmp_path: Path) -> None:
    # Two host bridges; behind the first one a switch with a GPU and a NIC, and another NIC beside it.
    places = {
        "0000:41:00.0": "pci0000:40/0000:40:01.0/0000:3f:00.0/0000:3e:00.0/0000:41:00.0",
        "0000:42:00.0": "pci0000:40/0000:40:01.0/0000:3f:00.0/0000:3e:01.0/0000:42:00.0",
        "0000:44:00.0": "pci0000:40/0000:40:02.0/0000:44:00.0",
        "0000:c1:00.0": "pci0000:c0/0000:c0:01.0/0000:c1:00.0",
    }
    express = bytes([0x10, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0])
    for name, path in places.items():
        folder = tmp_path / "sys/devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text("1\n" if "c0" in path else "0\n")
        (folder / "resource").write_text("0x1000 0x1fff 0x200\n0x4000000000 0x5fffffffff 0x14220c\n0x0 0x0 0x0\n")
        (folder / "config").write_bytes(bytes(0x34) + b"\x40" + bytes(11) + express)
        link = tmp_path / "sys/bus/pci/devices" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    for name, pci in {"mlx5_0": "0000:c1:00.0", "mlx5_1": "0000:44:00.0", "mlx5_2": "0000:42:00.0"}.items():
        link = tmp_path / "sys/class/infiniband" / name / "device"
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / "sys/devices" / places[pci])
    found = patient(libraries=VERBS | {"libcuda.so.1": Cuda(b"NVIDIA H200")})["GPU 0"].found
    assert found.splitlines() == [
        "NVIDIA H200",
        "PCI 0000:41:00.0, NUMA node 0, BAR of 128GiB",
        "dma-buf: yes; writes of NICs: in order",
        "  mlx5_2: the same switch, relaxed ordering",
        "  mlx5_1: the same host bridge, relaxed ordering",
        "  mlx5_0: another NUMA node, relaxed ordering",
    ]


@pytest.mark.parametrize("name", ["process_vm_readv", "memfd"])
def test_a_sandbox_that_refuses_what_one_host_needs(patient: Patient, name: str) -> None:
    class Refuses:
        class _Call:
            restype: Any = None

            def __call__(self, *_: object) -> int:
                return -1

        process_vm_readv = memfd_create = _Call()

    finding = patient(libraries={"libc.so.6": Refuses()})[name]
    assert (finding.status, "seccomp" in finding.fix) == ("missing", True)


def test_only_what_is_needed_makes_the_host_unhealthy(patient: Patient) -> None:
    assert healthy(list(patient().values()))
    without = [TransportInfo("local", True, ""), TransportInfo("tcp", False, "no sockets in this sandbox")]
    findings = patient(transports=without)
    assert findings["transport tcp"] == Finding(
        "transport tcp", "missing", "no sockets in this sandbox", needed=True
    )  # fmt: skip
    assert not healthy(list(findings.values()))


def test_impossible_settings_are_found(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_LANES", "abc")
    finding = patient()["settings"]
    assert (finding.status, finding.needed) == ("missing", True)
    assert "abc" in finding.found
    monkeypatch.setenv("MOONPOOL_ENGINE_LANES", "3")
    assert patient()["settings"] == Finding("settings", "OK", "set here: lanes")


def test_the_table_shows_every_fix(patient: Patient) -> None:
    console = Console(width=120, record=True, file=None)
    findings = list(patient({"proc/sys/net/core/somaxconn": "128"}).values())
    with console.capture() as shown:
        console.print(doctor_table(findings))
    for finding in findings:
        assert finding.name in shown.get()
        assert finding.fix in shown.get()


def test_the_command_on_this_host() -> None:
    result = CliRunner().invoke(commands.cli, ["doctor"])
    assert result.exit_code == ExitStatus.OK
    assert "transport tcp" in result.output
    document = json.loads(CliRunner().invoke(commands.cli, ["doctor", "--json", "-"]).output)
    assert set(document) == {"schema", "environment", "healthy", "checks", "rdma", "gpus"}
    assert (document["schema"], document["healthy"]) == (1, True)
    for check in document["checks"]:
        assert list(check) == ["name", "status", "found", "fix", "needed"]
        assert check["status"] in ("OK", "degraded", "missing")


def test_an_unhealthy_host_shows_in_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("transport tcp", "missing", "", needed=True)])
    result = CliRunner().invoke(commands.cli, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert result.exit_code == 1
    assert not json.loads((tmp_path / "doctor.json").read_text())["healthy"]
