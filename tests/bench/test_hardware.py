# SPDX-License-Identifier: Apache-2.0
"""The steps of the hardware check: what they find wrong, and what the report makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from moonpool.address import Address
from moonpool.bench import backends, commands
from moonpool.bench.backends import Place
from moonpool.bench.backends.moonpool_engine import MoonpoolTcp
from moonpool.bench.examined import Host
from moonpool.bench.hardware import correctness as exchanging
from moonpool.bench.hardware import drill as drilling
from moonpool.bench.hardware import sweep as sweeping
from moonpool.bench.hardware.links import Link, why_not
from moonpool.bench.hardware.report import write_report
from moonpool.bench.hardware.steps import Check, Step, read_step, write_step
from moonpool.bench.measure import Window
from moonpool.bench.rails import Rail
from moonpool.bench.results import RowResult
from moonpool.bench.targets import InProcessTarget
from moonpool.bench.work import Tuning, Work
from moonpool.transfer_engine import TransferEngine

RAIL = Rail("mlx5_0", 1, True, "10.0.0.1", 3, "")


# ---------------------------------------------------------------- correctness


class OverTcp(TransferEngine):
    """Takes TCP where RDMA is asked for."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **{**options, "transports": "tcp", "require": None})


class Shortens(OverTcp):
    """Forgets the last byte of what it writes."""

    def write(self, *arguments: Any, **options: Any) -> Any:
        *others, lengths = arguments
        last = np.arange(len(lengths)) == len(lengths) - 1
        return super().write(*others, np.where(last & (lengths > 1), lengths - 1, lengths), **options)


class Strays(OverTcp):
    """Reads two bytes that nobody asked for."""

    def read(self, *arguments: Any, **options: Any) -> Any:
        peer, local, remote, *_ = arguments
        super().read(peer, local, remote, 0, 0, 2).wait(10)
        return super().read(*arguments, **options)


def run_correctness(monkeypatch: pytest.MonkeyPatch, engine: type[TransferEngine]) -> dict[str, Check]:
    monkeypatch.setitem(backends.ENGINES, "rdma", MoonpoolTcp)
    monkeypatch.setattr(exchanging, "TransferEngine", engine)
    target = InProcessTarget(Place())
    try:
        step = exchanging.correctness(target, Place(), exchanging.QUICK, Tuning(), 7, lambda _: None)
    finally:
        target.close()
    return {check.check.removeprefix("correctness: "): check for check in step.checks}


def test_bytes_that_are_right_but_not_over_rdma_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = run_correctness(monkeypatch, OverTcp)
    assert {name: check.result for name, check in checks.items()} == {
        "read": "passed",
        "write": "passed",
        "over RDMA": "failed",
    }
    assert "9 transfers" in checks["read"].figure
    assert "path tcp" in checks["over RDMA"].figure


def test_a_byte_that_was_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = run_correctness(monkeypatch, Shortens)
    assert checks["write"].result == "failed"
    assert checks["write"].detail == "1 × 65 B: the memory of the target is not what it has to be"


def test_bytes_that_were_not_asked_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = run_correctness(monkeypatch, Strays)
    assert checks["read"].result == "failed"
    assert "bytes of this side's memory are wrong, the first at" in checks["read"].detail


def test_the_full_plan_fits_and_has_what_it_promises() -> None:
    plan = exchanging.FULL
    assert min(block for block, _ in plan.cases) == 1
    assert max(block for block, _ in plan.cases) == 64 << 20
    assert all(block * batch <= plan.footprint_bytes for block, batch in plan.cases)
    assert all(plan.footprint_bytes // batch >= block for block, batch in plan.cases)
    assert plan.footprint_bytes % 4096 == 0


# ---------------------------------------------------------------- sweep


def result(ratio: float | None, *, complaint: str = "") -> RowResult:
    made = RowResult(Work("rdma", "write", 65536, 1, "sequential", 1, None, 1 << 20), "moonpool")
    made.engine = [Window(1.0, 10, int(1e9 * (1.0 if ratio is None else ratio)), None)]
    if ratio is None:
        made.no_limit = "ib_write_bw of perftest is not installed"
    else:
        made.limit, made.limits = "ib_write_bw", [Window(1.0, 10, int(1e9), None)]
    made.complaints = [complaint] if complaint else []
    return made


@pytest.mark.parametrize(
    ("row", "bar", "judged", "becomes"),
    [
        (result(0.91), 0.90, True, "passed"),
        (result(0.89), 0.90, True, "failed"),
        (result(0.5), 0.90, False, "shown"),
        (result(0.5), None, True, "shown"),
        (result(None), 0.90, True, "skipped"),
        (result(0.99, complaint="byte 7"), 0.90, True, "failed"),
        (result(None, complaint="byte 7"), 0.90, False, "failed"),
    ],
)
def test_a_row_is_judged_by_its_bar(row: RowResult, bar: float | None, judged: bool, becomes: str) -> None:
    assert sweeping._line(row, bar, judged=judged).result == becomes


def test_the_bars() -> None:
    assert {(block, batch): bar for block, batch, bar in sweeping.FULL.rows} == {
        (64 << 10, 1): 0.90, (1 << 20, 1): 0.90, (64 << 10, 64): 0.85, (4 << 10, 1024): 0.85
    }  # fmt: skip


# ---------------------------------------------------------------- drill


def story(**fields: Any) -> drilling._Story:
    def phase(name: str, first: int, second: int, over: str, fallback: str = "") -> dict[str, Any]:
        rails = {"mlx5_0:1": first, "mlx5_1:1": second}
        return {"phase": name, "gbytes_per_s": 1.0, "over": over, "fallback": fallback, "rail_bytes": rails}

    made = drilling._Story("", went_down=True, came_up=True, back_s=0.5)
    made.phases = [phase("before", 5, 5, "rdma"), phase("down", 0, 9, "rdma"), phase("after", 5, 5, "rdma")]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def judged(made: drilling._Story, number: int = 0, *, by_hand: bool = False) -> list[str]:
    checks = drilling._judged(drilling._SCENARIOS[number], made, "mlx5_0:1", by_hand=by_hand)
    return [check.result for check in checks]


def test_a_drill_is_judged_by_what_the_rails_carried() -> None:
    assert judged(story()) == ["passed", "passed", "passed"]
    assert judged(story(complaints=["byte 7"])) == ["failed", "passed", "passed"]
    assert judged(story(back_s=None)) == ["passed", "passed", "failed"]
    assert judged(story(came_up=False)) == ["passed", "passed", "failed"]
    assert judged(story(failure="gone")) == ["failed"]
    assert judged(story(went_down=False)) == ["failed"]
    assert judged(story(went_down=False), by_hand=True) == ["skipped"]
    still = story()
    still.phases[1]["rail_bytes"]["mlx5_0:1"] = 1
    assert judged(still) == ["passed", "failed", "passed"]
    # The only rail: nothing but TCP, and a reason; or an error that names the rail.
    assert judged(story(), 1)[1] == "failed"
    fallen = story()
    fallen.phases[1] |= {"over": "tcp", "fallback": "rdma: the port went down"}
    assert judged(fallen, 1)[1] == "passed"
    assert judged(fallen, 2)[1] == "failed"
    error = {"type": "TransportUnavailableError", "code": "TRANSPORT_UNAVAILABLE", "text": "rail mlx5_0:1 went down"}
    assert judged(story(error=error), 2)[1] == "passed"
    assert judged(story(error={**error, "text": "no idea"}), 2)[1] == "failed"


class Port:
    """A host with one RoCE port, whose address the network device ens1 has."""

    def __init__(self, root: Path) -> None:
        self.host = Host(root, rails=lambda: [RAIL], load=lambda _: None)
        self._port = root / "sys/class/infiniband/mlx5_0/ports/1"
        self.write("link_layer", "Ethernet")
        self.write("state", "4: ACTIVE")
        self.write("gids/3", "0000:0000:0000:0000:0000:ffff:7f00:0001")  # 127.0.0.1
        self.write("gid_attrs/ndevs/3", "ens1")
        self.netdev = root / "sys/class/net/ens1"
        self.netdev.mkdir(parents=True)
        self.routes = root / "proc/net/route"
        self.routes.parent.mkdir(parents=True)
        self.status = root / "proc/self/status"
        self.status.parent.mkdir()
        self.status.write_text(f"PPid:\t7\nCapEff:\t{1 << 12:016x}\n")
        self.routes6 = root / "proc/net/ipv6_route"
        self._parent = root / "proc/7"
        self._parent.mkdir()
        (self._parent / "status").write_text("PPid:\t0\n")

    def parent(self, environ: str) -> None:
        """Give the process that this one was started by an environment."""
        (self._parent / "environ").write_text(environ)

    def write(self, name: str, text: str) -> None:
        path = self._port / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.setattr("shutil.which", lambda _: "/sbin/ip")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return Port(tmp_path)


def refused(port: Port, target: str = "::1", *, careful: bool = True) -> str:
    return why_not(port.host, RAIL, Address(target, 7800), careful=careful)


def test_a_link_is_not_taken_down_where_that_would_cut_more_than_a_rail(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(port) == ""
    assert "is reached over ens1 itself" in refused(port, "127.0.0.1", careful=False)

    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.9 50000 127.0.0.1 22")
    assert "this session came in over ens1" in refused(port)
    assert refused(port, careful=False) == ""
    monkeypatch.delenv("SSH_CONNECTION")

    # sudo keeps the variable to itself.
    port.parent("HOME=/\0SSH_CONNECTION=192.0.2.9 50000 127.0.0.1 22\0")
    assert "this session came in over ens1" in refused(port)
    port.parent("")

    port.routes6.write_text(f"{'0' * 32} 00 {'0' * 32} 00 {'fe8' + '0' * 28 + '1'} 00000400 1 0 00000003     ens1\n")
    assert "the default route goes over ens1" in refused(port)
    port.routes6.write_text(f"{'fe8' + '0' * 29} 40 {'0' * 32} 00 {'0' * 32} 00000100 1 0 00000001     ens1\n")
    assert refused(port) == ""

    port.routes.write_text("Iface\tDestination\tGateway\nens1\t00000000\t0100000A\n")
    assert "the default route goes over ens1" in refused(port)
    assert refused(port, careful=False) == ""

    port.status.write_text("CapEff:\t0000000000000000\n")
    assert "it has not CAP_NET_ADMIN" in refused(port, careful=False)

    (port.netdev / "lower_ens1f0").mkdir()
    assert "ens1 is on top of ens1f0" in refused(port, careful=False)


def test_a_port_of_infiniband_has_no_link_to_take_down(port: Port) -> None:
    port.write("link_layer", "InfiniBand")
    assert "has no Ethernet link that this host could take down; --drill manual" in refused(port, careful=False)


def test_a_link_is_noted_for_as_long_as_it_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Link, "_set", lambda self, state: said.append(f"{state} {note.exists()}"))
    note = tmp_path / "link-is-down"
    with Link(RAIL, "ens1", note) as link:
        link.up()
        link.down()
        assert note.read_text() == "ens1\n"
    assert not note.exists()
    assert said == ["down True", "up True"]


# ---------------------------------------------------------------- the report


def side(**rail: Any) -> dict[str, Any]:
    environment = dict.fromkeys(("host", "cpu", "cores", "kernel", "moonpool", "revision", "python"), "x|y")
    rails = [{"device": "mlx5_0", "port": 1, "up": True, "gid": "10.0.0.1", "gid_index": 1, "reason": "", **rail}]
    return {
        "time": "now", "doctor": {"environment": environment, "rdma": []}, "rails": rails, "numa_nodes": 2,
        "locked_memory_bytes": -1, "perftest": None, "gpus": ["NVIDIA H100, 550.54"],
    }  # fmt: skip


def test_the_report_says_what_failed_and_keeps_what_a_dead_step_had_found(tmp_path: Path) -> None:
    write_step(
        tmp_path, "facts",
        Step([Check("doctor: here", "passed")],
             {"here": side(), "target": side(), "devices": None, "target_devices": "mlx5_1", "quick": False}),
    )  # fmt: skip
    write_step(tmp_path, "correctness", Step([Check("correctness: read", "passed", "1 | 2", "all")], {"seed": 1}))
    (tmp_path / "correctness.ended").write_text("did not end within 600 s\n")
    (tmp_path / "correctness.log").write_text("first\nlast words\n")
    file = tmp_path / "report.md"
    assert not write_report(tmp_path, file, ["facts", "correctness", "drill"])
    text = file.read_text()
    assert "**FAILED**: 2 passed, 2 failed, 1 skipped." in text
    assert "| correctness: read | pass | 1 \\| 2 | all |" in text
    assert "| correctness | **FAIL** | did not end within 600 s |" in text
    assert "* correctness (failed): first / last words" in text
    assert "| drill | **FAIL** | it was not made |" in text
    assert "* sweep (skipped): not among --steps" in text
    assert "| GPUs | NVIDIA H100, 550.54 | NVIDIA H100, 550.54 |" in text
    assert "GPU memory is not part of this check" in text
    assert "Devices asked for: here all, target mlx5_1." in text

    document = json.loads(file.with_suffix(".json").read_text())
    assert (document["schema"], document["passed"], document["correctness"]["seed"]) == (1, False, 1)
    assert [check["result"] for check in document["checks"]] == ["passed", "passed", "failed", "skipped", "failed"]


def test_a_step_that_wrote_nothing_is_none(tmp_path: Path) -> None:
    assert read_step(tmp_path, "drill") is None


@pytest.fixture
def step(tmp_path: Path) -> Callable[..., Any]:
    def run(*words: str) -> Any:
        options = ["--target", "127.0.0.1:1", "--folder", str(tmp_path)]
        return CliRunner().invoke(commands.cli, ["hardware", words[0], *options, *words[1:]])

    return run


def test_a_drill_that_is_not_wanted_calls_nobody(step: Callable[..., Any], tmp_path: Path) -> None:
    assert step("sweep").exit_code == 2  # there are no facts yet
    write_step(tmp_path, "facts", Step([], {"here": {"rails": [RAIL.__dict__]}}))
    assert step("drill", "--how", "skip", "--why", "not today").exit_code == 0
    assert read_step(tmp_path, "drill") == Step([Check("drill", "skipped", "", "", "not today")], {})


def test_a_report_is_written_though_the_target_is_gone(step: Callable[..., Any], tmp_path: Path) -> None:
    done = step("report", "--steps", "sweep", "--report", str(tmp_path / "report.md"))
    assert done.exit_code == 1
    assert "the target could not be told that it is over" in done.output
    assert (tmp_path / "report.json").exists()
