# SPDX-License-Identifier: Apache-2.0
"""The comparison as a user runs it: real engines in real processes, in windows too short to measure anything."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.contender import Contender
from moonpool.bench.errors import BenchError, ExitStatus
from moonpool.bench.work import Work

Bench = Callable[..., subprocess.CompletedProcess[str]]
TINY = ["--block-size", "4KiB,64KiB", "--batch", "1,4", "--footprint", "1MiB"]
TINY += ["--duration", "2ms", "--warmup", "1ms", "--rounds", "2"]


def compared(bench: Bench, *arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    done = bench("compare", *TINY, *arguments, "--json", "-", environ=environ)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_moonpool_and_sockets_side_by_side(bench: Bench, tmp_path: Path) -> None:
    done = bench("compare", *TINY, "--backends", "moonpool,socket", "--json", str(tmp_path / "run.json"), "--plot",
                 str(tmp_path / "run.png"))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "moonpool / sockets: at least" in done.stdout
    document = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert document["skipped"] == []
    # Random order only where a batch has an order.
    assert len(document["rows"]) == 2 * 2 * 2 * (2 + 1) * 2
    for row in document["rows"]:
        assert (row["verified"], row["rounds"], row["path"], row["failure"]) == (True, 2, "tcp", None)
        assert row["cpu_s_per_gb_target"] > 0
        assert (row["moonpool_ratio"] is None) == (row["backend"] == "moonpool")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_on_one_host_the_limits_are_memory_itself(bench: Bench) -> None:
    rows = compared(bench, "--over", "auto", "--backends", "moonpool,memcpy,process_vm", "--threads", "1,3")["rows"]
    assert {row["backend"] for row in rows} == {"moonpool", "memcpy", "process_vm"}
    assert all(row["verified"] and row["rounds"] == 2 for row in rows)
    assert {row["memory"] for row in rows} == {"allocated"}


def test_engines_that_are_not_there_are_named_and_skipped(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file')\n", encoding="utf-8"
    )
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'nixl'\", name='nixl')\n", encoding="utf-8"
    )
    done = bench("compare", *TINY, "--op", "read", "--threads", "1", environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0
    assert "skipped: mooncake: mooncake.engine does not import: libibverbs.so.1: cannot open" in done.stdout
    assert "Try: the system package of libibverbs, such as libibverbs1" in done.stdout
    assert "skipped: nixl: not installed. Try: pip install 'moonpool[compare]'" in done.stdout
    assert "moonpool / sockets: at least" in done.stdout


def test_an_engine_that_kills_its_process_is_skipped_with_its_last_words(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(
        "import os, sys\nprint('this CPU is too old', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 4)\n",
        encoding="utf-8",
    )
    arguments = ["--backends", "moonpool,mooncake", "--op", "read"]
    (skipped,) = compared(bench, *arguments, environ={"PYTHONPATH": str(tmp_path)})["skipped"]
    assert skipped["backend"] == "mooncake"
    assert "a process died of SIGILL" in skipped["reason"]
    assert "this CPU is too old" in skipped["reason"]


@pytest.mark.parametrize(("name", "module"), [("mooncake", "mooncake.engine"), ("nixl", "nixl._api")])
@pytest.mark.parametrize("over", ["tcp", "auto"])
def test_the_real_engines(bench: Bench, name: str, module: str, over: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", f"import {module}"], check=False, capture_output=True, text=True, timeout=100
    )
    if found.returncode:
        pytest.skip(f"{module} does not import: {found.stderr.strip().splitlines()[-1]}")
    document = compared(bench, "--over", over, "--backends", f"moonpool,{name}", "--memory", "registered")
    assert document["skipped"] == []
    theirs = [row for row in document["rows"] if row["backend"] == name]
    assert len(theirs) == 2 * 2 * 2 * 3
    for row in theirs:
        assert (row["verified"], row["complaints"], row["failure"], row["rounds"]) == (True, [], None, 2)
        assert row["moonpool_ratio"] > 0
    assert document["environment"]["versions"][name]


WORK = Work("tcp", "read", 4096, 1, "sequential", 1, None, 1 << 20)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def test_between_its_turns_a_contender_is_stopped() -> None:
    contender = Contender("moonpool", "tcp", 1 << 20)
    try:
        pids = [side.pid for side in contender._sides]
        contender.open(WORK, 1)
        for pid in pids:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped(pid)
        assert contender.measure(2, 0.001, 0.001).complaints == []
    finally:
        contender.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_contender_whose_process_is_gone_says_so() -> None:
    contender = Contender("moonpool", "tcp", 1 << 20)
    os.kill(contender._sides[0].pid, signal.SIGKILL)
    with pytest.raises(BenchError, match="a process died of SIGKILL"):
        contender.open(WORK, 1)
    contender.kill()


def test_stopped_processes_end_with_their_parent() -> None:
    script = (
        "import os, signal, sys\n"
        "from moonpool.bench.contender import Contender\n"
        "contender = Contender('moonpool', 'tcp', 1 << 20)\n"
        "print(*(side.pid for side in contender._sides), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL
    for pid in map(int, done.stdout.split()):
        # Nobody's child any more: a descriptor of the process is readable when it has ended.
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], 60.0)[0]
        finally:
            os.close(descriptor)


def test_the_exit_status_counts_only_moonpool(bench: Bench) -> None:
    done = bench("compare", *TINY, "--backends", "moonpool", environ={"MOONPOOL_ENGINE_SPIN_US": "often"})
    assert done.returncode == ExitStatus.FAILED
    assert "spin_us" in done.stderr.lower()
