# SPDX-License-Identifier: Apache-2.0
"""`mooncake-bench` over RDMA beside perftest, in windows too short to measure anything."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rdma_lab.inside.links import run

BENCH = ("python3.11", "-m", "moonpool.bench.cli", "transfer", "--transport", "rdma")
TINY = ("--footprint", "2MiB", "--duration", "50ms", "--warmup", "20ms", "--rounds", "2")
ENDS = ("--devices", "rxea0", "--target-devices", "rxea1")
LIMIT = 150.0
# Every perftest and every process of Python is seconds of this machine.
pytestmark = pytest.mark.timeout(200)


def measured(*options: str) -> list[dict[str, Any]]:
    document = json.loads(run(*BENCH, *TINY, *options, "--json", "-", limit=LIMIT))
    rows: list[dict[str, Any]] = document["rows"]
    assert all(row["verified"] and row["path"] == "rdma" and not row["complaints"] for row in rows)
    return rows


def perftests() -> list[str]:
    """Programs of perftest that run now."""
    names = (path.read_text(errors="replace").strip() for path in Path("/proc").glob("[0-9]*/comm"))
    return [name for name in names if name.startswith(("ib_write", "ib_read"))]


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_sweep_stands_beside_perftest(op: str) -> None:
    # No latency: perftest measures the frequency of the processor for it, which an emulated one hardly has.
    (row,) = measured(*ENDS, "--op", op, "--block-size", "64KiB", "--batch", "1")
    assert row["limit"] == f"ib_{op}_bw"
    assert row["limit_p50_us"] is None
    assert (row["rounds"], len(row["ratios"]), row["ratio"] > 0.0) == (2, 2, True)
    assert list(row["rail_bytes"]) == ["rxea0:1"]
    assert row["rail_bytes"]["rxea0:1"] >= row["block_bytes"] * 4
    assert perftests() == []


def test_both_rails_carry_bytes() -> None:
    ends = ("--devices", "rxea0,rxeb0", "--target-devices", "rxea1,rxeb1")
    (row,) = measured(
        *ends,
        "--op",
        "write",
        "--block-size",
        "1MiB",
        "--batch",
        "2",
        "--slice",
        "64KiB",
        "--only",
        "engine",
        "--duration",
        "500ms",
    )
    assert set(row["rail_bytes"]) == {"rxea0:1", "rxeb0:1"}
    assert min(row["rail_bytes"].values()) > 0


def test_settings_reach_the_engines() -> None:
    options = ("--queue-pairs", "1,4", "--inline", "0", "--spin-us", "0", "--slice", "64KiB")
    rows = measured(*ENDS, *options, "--op", "write", "--block-size", "64", "--batch", "1", "--only", "engine")
    assert [row["tuning"]["queue_pairs"] for row in rows] == [1, 4]
    assert {(row["tuning"]["devices"], row["tuning"]["target_devices"]) for row in rows} == {("rxea0", "rxea1")}
    assert [row["lanes"] for row in rows] == [1, 4]


def test_without_perftest_a_row_has_no_limit_and_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "python3.11").symlink_to("/usr/bin/python3.11")
    done = subprocess.run(
        [*BENCH, *TINY, *ENDS, "--op", "write", "--block-size", "64KiB", "--json", str(tmp_path / "run.json")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "no limit: on the target: ib_write_bw of perftest is not installed. Try: apt-get install perftest"
        in " ".join(done.stdout.split())
    )
    (row,) = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert (row["limit"], row["ratio"], "perftest" in row["no_limit"]) == (None, None, True)
    assert row["gbytes_per_s"] > 0.0


def test_two_processes_with_an_address_between_them(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w")
    with log, subprocess.Popen([*BENCH[:4], "--listen", "127.0.0.1:7800"], stderr=log) as listening:
        try:
            for _ in range(600):
                if "listening" in (tmp_path / "log").read_text():
                    break
                listening.poll()
                with pytest.raises(subprocess.TimeoutExpired):
                    listening.wait(0.1)
            (row,) = measured(*ENDS, "--target", "127.0.0.1:7800", "--op", "write", "--block-size", "64KiB")
            assert row["limit"] == "ib_write_bw"
            assert listening.wait(30) == 0
        finally:
            listening.kill()
