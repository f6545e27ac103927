# SPDX-License-Identifier: Apache-2.0
"""Pools side by side: Moonpool's own, and a stand-in for Mooncake with programs and a client of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_testing
import pytest
from bench_testing import Terminal
from click.testing import CliRunner

from moonpool.bench import commands
from moonpool.bench.contender import Contending, Measured
from moonpool.bench.errors import ExitStatus, VerificationError
from moonpool.bench.measure import Percentiles, Window
from moonpool.bench.pool.peers import command
from moonpool.bench.pool.peers.base import LookRow, asking_of
from moonpool.bench.work import Work

Bench = Callable[..., subprocess.CompletedProcess[str]]

MOVED = "store --block-size 4KiB --batch 4 --footprint 64KiB --dram 16MiB --duration 5ms --warmup 1ms --rounds 2"
ASKED = "master --hashes 10 --in-flight 2 --duration 5ms --warmup 1ms --rounds 2"
SHORT_LEASE = {"MOONPOOL_STORE_CLIENT_LEASE": "500ms"}
KEYS = {
    "backend",
    "op",
    "block_bytes",
    "batch",
    "threads",
    "footprint_bytes",
    "path",
    "gbytes_per_s",
    "items_per_s",
    "p50_us",
    "p99_us",
    "p999_us",
    "moonpool_ratio",
    "moonpool_ratios",
    "rounds",
    "verified",
    "complaints",
    "failure",
}


class Fake(Contending):
    """Has no pool at all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "1.2.3"

    def open(self, work: Work, window: int) -> None:
        pass

    def close_row(self) -> None:
        pass

    def close(self) -> None:
        pass

    kill = close


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """Return the environment in which the stand-in is installed."""
    folder, testing = tmp_path / "mooncake", Path(bench_testing.__file__).parent
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(testing / "mooncake_store.py", folder / "store.py")
    for name in ("mooncake_master", "mooncake_client"):
        text = (testing / "mooncake_server.py").read_text(encoding="utf-8")
        (folder / name).write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
        (folder / name).chmod(0o755)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Secret and TLS are of another pool than those that are started.
    another = {"MOONPOOL_STORE_CLIENT_TLS_CA": "elsewhere.pem", "MOONPOOL_STORE_CLIENT_SECRET": "another"}
    return {"PYTHONPATH": os.pathsep.join(paths), **SHORT_LEASE, **another}


def compared(bench: Bench, arguments: str, environ: dict[str, str]) -> dict[str, Any]:
    done = bench(*arguments.split(), "--json", "-", environ=environ)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_puts_and_gets_side_by_side(bench: Bench, stand_in: dict[str, str]) -> None:
    document = compared(bench, f"{MOVED} --backends moonpool,mooncake,mooncake-dummy --threads 2", stand_in)
    assert set(document) == {"schema", "environment", "interrupted", "skipped", "rows"}
    assert document["skipped"] == []
    rows = document["rows"]
    assert [(row["op"], row["backend"]) for row in rows] == [
        (op, name) for op in ("put", "get") for name in ("moonpool", "mooncake", "mooncake-dummy")
    ]
    for row in rows:
        assert set(row) == KEYS
        assert (row["rounds"], row["verified"], row["failure"], row["threads"]) == (2, True, None, 2)
        assert row["items_per_s"] * 4096 == pytest.approx(row["gbytes_per_s"] * 1e9, rel=1e-3)
        assert len(row["moonpool_ratios"]) == (0 if row["backend"] == "moonpool" else 2)


def test_calls_of_masters_side_by_side(bench: Bench, stand_in: dict[str, str]) -> None:
    done = bench(*ASKED.split(), "--backends", "moonpool,mooncake", environ=stand_in)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("exists", "match", "put", "moonpool /s", "mooncake /s", "ratio", "moonpool / mooncake: at least"):
        assert text in done.stdout
    assert "NOT VERIFIED" not in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="it is installed")
def test_who_is_not_installed_is_named_and_skipped(bench: Bench) -> None:
    done = bench(*MOVED.split(), "--op", "get", "--backends", "moonpool,mooncake", "--json", "-", environ=SHORT_LEASE)
    assert done.returncode == 0
    assert "mooncake is left out: not installed. Try: pip install 'moonpool[compare]'" in done.stderr
    document = json.loads(done.stdout)
    assert document["skipped"][0]["backend"] == "mooncake"
    assert [row["rounds"] for row in document["rows"]] == [2, 0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("server", "mooncake_master did not start: the stand-in does not like to be started"),
        ("get", "Mooncake: a batch of get returned -800 for item 0 of 4"),
    ],
)
def test_who_fails_is_named_and_the_others_go_on(bench: Bench, stand_in: dict[str, str], bad: str, words: str) -> None:
    arguments = f"{MOVED} --op get --backends moonpool,mooncake"
    document = compared(bench, arguments, {**stand_in, "STAND_IN": bad})
    ours, theirs = document["rows"]
    assert (ours["rounds"], theirs["rounds"]) == (2, 0)
    assert words in theirs["failure"]


def test_wrong_bytes_of_others_are_shown(bench: Bench, stand_in: dict[str, str]) -> None:
    done = bench(*MOVED.split(), "--backends", "moonpool,mooncake", environ={**stand_in, "STAND_IN": "bytes"})
    assert done.returncode == 0, "they are a finding about the other store"
    assert "BAD" in done.stdout
    assert "NOT VERIFIED: mooncake: get 4KiB × 4: " in done.stdout
    assert "NOT VERIFIED: mooncake: put 4KiB × 4: round 1, put, got again: " in done.stdout


def test_wrong_answers_are_complaints() -> None:
    asked, cleared = asking_of("exists", 10, 2), []
    row = LookRow(asked, lambda group: group != 3, range(4), lambda: cleared.append(True))
    window = row.engine_window(0.005, 0.0)
    assert window.payload_bytes == 32 * 10 * window.transfers
    assert set(row.complaints) == {"a chunk that was put was not there"}
    assert len(row.complaints) <= 8
    row.close()
    assert cleared


def test_damage_that_the_own_client_finds_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged(Fake):
        def measure(self, window: int, warmup: float, duration: float) -> Measured:
            raise VerificationError("a get found damage")

    monkeypatch.setattr(command, "PoolContender", lambda name, peers: Damaged(name))
    result = CliRunner().invoke(commands.cli, [*MOVED.split(), "--backends", "moonpool"])
    assert result.exit_code == ExitStatus.NOT_VERIFIED
    assert "a get found damage" in result.output


def test_windows_of_a_round_come_in_turning_order(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Logged(Fake):
        def measure(self, window: int, warmup: float, duration: float) -> Measured:
            log.append(self.name)
            return Measured(Window(1.0, 10, 10**9 * (1 + (self.name == "moonpool")), Percentiles(1.0, 2.0, 3.0)))

    monkeypatch.setattr(command, "PoolContender", lambda name, peers: Logged(name))
    arguments = [*MOVED.split(), "--op", "get", "--backends", "moonpool,mooncake"]
    result = CliRunner().invoke(commands.cli, arguments)
    assert result.exit_code == 0, result.output
    assert log == ["moonpool", "mooncake", "mooncake", "moonpool"]
    assert "moonpool / mooncake: at least 2.00 (get 4KiB × 4)" in result.output


def descendants(pid: int) -> list[int]:
    """Return the processes that the first thread of this one has started, and so on."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def running(pid: int) -> bool:
    """Whether it has not ended; who has may still wait to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_process_outlives_ctrl_c(stand_in: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = MOVED.replace("--rounds 2", "--rounds 1000").split()
    terminal = Terminal(
        *arguments, "--op", "get", "--backends", "moonpool,mooncake", "--json", str(file), environ=stand_in
    )
    terminal.wait_for("round 3 of 1000")
    pids = [below for child in terminal.children() for below in (child, *descendants(child))]
    # Two clients; a master and a node of each.
    assert len(pids) == 6
    terminal.send(signal.SIGINT)
    status, output = terminal.ended()
    assert status == ExitStatus.INTERRUPTED
    assert not any(map(running, pids))
    assert "moonpool / mooncake: at least" in output
    assert json.loads(file.read_text())["interrupted"]


def test_no_process_outlives_kill_9(stand_in: dict[str, str]) -> None:
    arguments = MOVED.replace("--rounds 2", "--rounds 1000").split()
    terminal = Terminal(*arguments, "--op", "get", "--backends", "moonpool,mooncake", environ=stand_in)
    terminal.wait_for("round 2 of 1000")
    pids = [below for child in terminal.children() for below in (child, *descendants(child))]
    terminal.send(signal.SIGKILL)
    terminal.ended()
    deadline = time.monotonic() + 30.0
    while any(map(running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("store --backends moonpool,redis", "One of moonpool, mooncake, mooncake-dummy"),
        ("store --backends mooncake,mooncake", "named more than once"),
        ("store --backends moonpool --master here:1", "does not go with --master"),
        ("store --backends moonpool --nodes 2 --replicas 2", "pools of one node"),
        ("store --backends moonpool --memory buffers", "registered memory"),
        ("master --backends moonpool --call pin", "--call exists,match,put"),
        ("master --backends moonpool --measure memory", "--measure rpc"),
    ],
)
def test_impossible_options_are_status_2(arguments: str, words: str) -> None:
    result = CliRunner().invoke(commands.cli, arguments.split())
    assert result.exit_code == ExitStatus.USAGE
    assert words in result.output


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for key in KEYS:
        assert f"`{key}`" in page, key


@pytest.mark.parametrize("in_flight", [1, 16, 17, 64, 1000])
def test_every_thread_has_something_to_put(in_flight: int) -> None:
    assert asking_of("put", 10, in_flight).batches >= 1
