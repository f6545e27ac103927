# SPDX-License-Identifier: Apache-2.0
"""`deploy/hardware_check.sh` on one host with two cables, in windows too short to measure anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rdma_lab.inside.links import Links, state, wait_until

SCRIPT = Path("/lab/deploy/hardware_check.sh")
ENVIRON = {**os.environ, "MOONCAKE_BENCH": "python3.11 -m moonpool.bench.cli"}
LIMIT = 180.0
# Every step is a process of Python, and each takes seconds of this machine.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not processes(), "the end of all processes of the check")
    assert state("rxea0") == "ACTIVE"


def processes() -> list[str]:
    """Processes of the benchmark and of perftest that run now."""
    lines = (path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [line for line in lines if "moonpool.bench" in line or line.startswith("ib_")]


def command(
    *options: str, devices: str = "rxea0", target_devices: str = "rxea1", mode: Sequence[str] = ("local",)
) -> list[str]:
    ends = ("--devices", devices, "--target-devices", target_devices)
    return ["bash", str(SCRIPT), *mode, "--quick", *ends, "--report", "report.md", *options]


def check(folder: Path, *options: str, environ: dict[str, str] = ENVIRON, **more: Any) -> tuple[int, str]:
    """Run the script in a folder; return its exit status, and what it said."""
    done = subprocess.run(
        command(*options, **more),
        cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def report(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return document


def results(document: dict[str, Any]) -> dict[str, str]:
    return {check["check"]: check["result"] for check in document["checks"]}


def test_everything_on_one_host(tmp_path: Path) -> None:
    status, said = check(tmp_path, devices="rxea0,rxeb0", target_devices="rxea1,rxeb1")
    assert status == 0, said
    document = report(tmp_path)
    assert results(document) == {
        "doctor: here": "passed",
        "doctor: target": "passed",
        "correctness: read": "passed",
        "correctness: write": "passed",
        "correctness: over RDMA": "passed",
        "sweep: rdma write 64KiB × 1": "shown",
        "sweep: rdma write 64KiB × 16": "shown",
        "drill: one rail of several down, write: bytes": "passed",
        "drill: one rail of several down, write: traffic": "passed",
        "drill: one rail of several down, write: back": "passed",
        "drill: the only rail down, write: bytes": "passed",
        "drill: the only rail down, write: traffic": "passed",
        "drill: the only rail down, write: back": "passed",
        "drill: the only rail down, rdma required: bytes": "passed",
        "drill: the only rail down, rdma required: traffic": "passed",
        "drill: the only rail down, rdma required: back": "passed",
    }
    assert [row["limit"] for row in document["sweep"]["rows"]] == ["ib_write_bw"] * 2

    several, alone, required = document["drill"]["scenarios"]
    down = next(phase for phase in several["phases"] if phase["phase"] == "down")
    assert down["rail_bytes"]["rxea0:1"] == 0
    assert down["rail_bytes"]["rxeb0:1"] >= down["payload_bytes"] > 0
    assert several["phases"][-1]["rail_bytes"]["rxea0:1"] > 0
    down = next(phase for phase in alone["phases"] if phase["phase"] == "down")
    assert (down["over"], down["rail_bytes"]) == ("tcp", {"rxea0:1": 0})
    assert "rxea0" in required["error"]["text"]

    text = (tmp_path / "report.md").read_text()
    assert "**PASSED**: 14 passed, 2 shown." in text
    assert "| correctness: read | pass | 9 transfers" in text
    assert "| locked memory | unlimited | unlimited |" in text
    assert "| here | rxea0:1 | ACTIVE |" in text


def test_two_hosts_without_perftest_have_no_ratios_and_are_told_why(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for path in Path("/usr/bin").iterdir():
        if not path.name.startswith("ib_"):
            (folder / path.name).symlink_to(path)
    environ = {**ENVIRON, "PATH": f"{folder}:/usr/sbin:/busybox", "MOONCAKE_BENCH_SECRET": "s3cret"}
    log = (tmp_path / "log").open("w")
    target = ["bash", str(SCRIPT), "target", "--listen", "127.0.0.1:7800", "--limit", "200"]
    with log, subprocess.Popen(target, env=environ, stderr=log) as listening:
        try:
            wait_until(lambda: "listening" in (tmp_path / "log").read_text(), "the target to listen", LIMIT)
            steps = ("--steps", "correctness,sweep,drill", "--drill", "skip")
            status, said = check(tmp_path, *steps, mode=("run", "127.0.0.1:7800"), environ=environ)
            assert status == 0, said
            # It was told that nobody comes after this.
            assert listening.wait(30) == 0
        finally:
            listening.terminate()
    document = report(tmp_path)
    skipped = {check["check"]: check["detail"] for check in document["checks"] if check["result"] == "skipped"}
    assert set(skipped) == {"drill", "sweep: rdma write 64KiB × 1", "sweep: rdma write 64KiB × 16"}
    assert skipped["drill"] == "--drill skip"
    missing = "ib_write_bw of perftest is not installed. Try: apt-get install perftest"
    assert missing in skipped["sweep: rdma write 64KiB × 1"]
    assert document["facts"]["here"]["perftest"] is None
    assert all(row["gbytes_per_s"] > 0.0 for row in document["sweep"]["rows"])
    assert "s3cret" not in (tmp_path / "report.json").read_text() + (tmp_path / "report.md").read_text()


def test_a_device_that_is_not_there_is_named_and_nothing_is_checked(tmp_path: Path) -> None:
    status, said = check(tmp_path, devices="mlx5_7")
    assert status == 3
    assert 'rdma_devices names "mlx5_7", which is not here' in said
    assert "hardware_check: it could not begin" in said
    assert not (tmp_path / "report.md").exists()


def test_interrupted_in_the_drill_it_brings_the_link_up_and_ends_everything(tmp_path: Path, links: Links) -> None:
    with subprocess.Popen(command("--steps", "drill"), cwd=tmp_path, env=ENVIRON, stdin=subprocess.DEVNULL) as script:
        try:
            wait_until(lambda: state("rxea0") == "DOWN" or script.poll() is not None, "the rail to go down", LIMIT)
            assert script.poll() is None
            script.send_signal(signal.SIGINT)
            assert script.wait(60) == 130
        finally:
            script.kill()
    wait_until(lambda: state("rxea0") == "ACTIVE", "the rail to be up")
