# SPDX-License-Identifier: Apache-2.0
"""mooncake-bench on memory of GPUs: every byte of both sides, beside copies of the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import environment, library

from moonpool.bench.errors import ExitStatus
from moonpool.bench.work import gpu_of, is_memory

QUICK = "--op read,write --block-size 64KiB --batch 1,16 --footprint 4MiB --duration 20ms --warmup 5ms --rounds 1"


def bench(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    program = "import sys; from moonpool.bench.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "transfer", *options, *QUICK.split()],
        check=False,
        env=env or environment(library(), "devices=2"),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("transport", "memory", "path"),
    [
        ("tcp", "cuda:0", "tcp"),
        ("tcp", "cuda:1/registered", "tcp"),
        ("tcp", "registered/cuda:0", "tcp"),
        ("shm", "cuda:0", "cuda_ipc"),
    ],
)
def test_rows_are_verified_beside_copies_of_the_driver(transport: str, memory: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench("--transport", transport, "--memory", memory, "--json", str(file))
    assert done.returncode == ExitStatus.OK, done.stderr
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["verified"]
        assert (row["memory"], row["path"], row["limit"]) == (memory, path, "cuMemcpyAsync")
        assert row["limit_gbytes_per_s"] > 0


@pytest.mark.parametrize(
    ("transport", "memory", "why"),
    [
        ("tcp", "cuda", "is not there"),
        ("tcp", "cuda:0/allocated", "is not there"),
        ("local", "cuda:0", "does not go with"),
        ("shm", "registered/cuda:0", "from GPU to GPU"),
    ],
)
def test_what_does_not_go_together_is_refused(transport: str, memory: str, why: str) -> None:
    done = bench("--transport", transport, "--memory", memory)
    assert done.returncode == ExitStatus.USAGE
    assert why in " ".join(done.stderr.split())


def test_without_a_transport_those_are_measured_that_go_with_the_memory(tmp_path: Path) -> None:
    place = tmp_path / "result.json"
    done = bench("--memory", "registered/cuda:0", "--json", str(place))
    assert done.returncode == ExitStatus.OK, done.stderr
    assert {row["transport"] for row in json.loads(place.read_text("utf-8"))["rows"]} == {"tcp"}


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = bench("--transport", "tcp", "--memory", "cuda:7")
    assert done.returncode == ExitStatus.FAILED
    assert "there is no cuda:7: this process sees" in " ".join(done.stderr.split())


def test_a_host_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    done = bench("--transport", "tcp", "--memory", "cuda:0", env=environment(tmp_path / "libcuda.so.1"))
    assert done.returncode == ExitStatus.FAILED
    assert "cannot be opened" in done.stderr


def test_which_side_has_a_gpu() -> None:
    assert (gpu_of("cuda:3", target=False), gpu_of("cuda:3", target=True)) == (3, 3)
    assert (gpu_of("cuda:3/registered", target=False), gpu_of("cuda:3/registered", target=True)) == (3, None)
    assert (gpu_of("registered/cuda:1", target=False), gpu_of("registered/cuda:1", target=True)) == (None, 1)
    assert (gpu_of("cuda:0/cuda:1", target=False), gpu_of("cuda:0/cuda:1", target=True)) == (0, 1)
    for memory in ("registered/registered", "cuda:0/", "allocated/cuda:0", "cuda:0/cuda:1/cuda:2", ""):
        assert not is_memory(memory)
