# SPDX-License-Identifier: Apache-2.0
"""deploy/gpu_check.py on the stand-in for libcuda: what it says, and that wrong bytes are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda, environment, library

from moonpool.bench.gpu import correctness
from moonpool.bench.gpu.driver import Driver
from moonpool.bench.gpu.run import QUICK, Run
from moonpool.transfer_engine import copy_batch

SCRIPT = Path(__file__).parents[2] / "deploy" / "gpu_check.py"


def run_check(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--quick", *options]
    return subprocess.run(
        command, check=False, env=env or environment(library()), capture_output=True, text=True, timeout=280
    )


def test_every_part_is_made_and_reported(tmp_path: Path) -> None:
    report = tmp_path / "gpu.md"
    done = run_check("--report", str(report))
    found: dict[str, Any] = json.loads(report.with_suffix(".json").read_text("utf-8"))
    lines = {check["check"]: check for check in found["checks"]}
    assert done.returncode == 0, (done.stderr, [check for check in found["checks"] if check["result"] == "failed"])
    for name in (
        "doctor", "staged TCP, GPU to GPU", "staged TCP, host to GPU", "staged TCP, GPU to host",
        "CUDA IPC, GPU to GPU", "H2D and D2H, pinned", "H2D and D2H, not pinned", "dma-buf export",
        "virtual memory, tcp", "virtual memory, cuda_ipc", "memory of the device that stays in use",
    ):  # fmt: skip
        assert lines[name]["result"] == "passed", lines[name]
    # Neither are there on this host, or it says which one is.
    for name in ("RDMA, GPU to GPU", "expandable_segments"):
        assert lines[name]["result"] == "passed" or lines[name]["detail"], lines[name]
    rows = [row["row"] for row in found["rows"]]
    assert {row.partition(",")[0] for row in rows} >= {"gather", "scatter", "gather to host", "scatter from host"}
    assert {"H2D 1MiB", "D2H 1MiB", "between processes 1MiB"} <= set(rows)
    assert found["passed"]
    text = report.read_text("utf-8")
    assert "**PASSED**" in text
    assert "| staged TCP, GPU to GPU | pass |" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--report", "/nonexistent/gpu.md"), "/nonexistent/gpu.md cannot be written"),
        (("--report", "gpu.json"), "the same as JSON has that suffix"),
        (("--device", "9"), "there is no cuda:9: this process sees"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_check(*options)
    assert done.returncode != 0
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_fail_the_check(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(target: Any, to: Any, source: Any, begin: Any, nbytes: int) -> None:
        copy_batch(target, to, source, begin, nbytes - 1)

    monkeypatch.setattr(correctness, "copy_batch", short)
    driver = Driver(0)
    run = Run(driver, QUICK, float("inf"))
    with driver.memory(QUICK.nbytes) as address:
        correctness.check_copies(run, address)
    driver.close()
    assert [check.result for check in run.checks] == ["failed", "failed"]


def test_a_host_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    done = run_check("--report", str(tmp_path / "no.md"), env={**environment(tmp_path / "libcuda.so.1")})
    assert done.returncode == 1
    assert "cannot be opened" in done.stderr
    assert not (tmp_path / "no.md").exists()
