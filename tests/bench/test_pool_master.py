# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench master`` with real masters, in the shortest windows there are."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_testing import Terminal, interrupt
from click.testing import CliRunner

from moonpool.bench import commands
from moonpool.bench.errors import BenchError, ExitStatus
from moonpool.bench.pool import calls
from moonpool.bench.pool.calls import CALL_NAMES, Exists
from moonpool.bench.pool.loading import Loader
from moonpool.bench.pool.processes import MasterProcess
from moonpool.proto import pool_pb2 as pb

Bench = Callable[..., subprocess.CompletedProcess[str]]

TINY = "--measure rpc --hashes 1,50 --in-flight 1,4 --duration 2ms --warmup 1ms --rounds 2"

KEYS = {
    "call": str,
    "rpcs": list,
    "hashes": int,
    "in_flight": int,
    "calls_per_s": float,
    "items_per_s": float,
    "p50_us": float,
    "p99_us": float,
    "p999_us": float,
    "cpu_us_per_call": (float, type(None)),
    "limit": str,
    "limit_calls_per_s": float,
    "limit_p50_us": float,
    "limit_p99_us": float,
    "limit_cpu_us_per_call": (float, type(None)),
    "ratio": float,
    "ratios": list,
    "p50_ratio": float,
    "rounds": int,
    "verified": bool,
    "complaints": list,
}
MEMORY = {
    "chunks",
    "rss_empty_bytes",
    "rss_full_bytes",
    "rss_removed_bytes",
    "bytes_per_chunk",
    "index_bytes_per_chunk",
    "bytes_per_chunk_after_removal",
    "chunks_loaded_per_s",
    "verified",
}
RECOVERY = {"chunks", "store_bytes", "serving_s", "all_hits_s", "chunks_loaded_per_s", "verified"}


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_every_call_stands_beside_an_echo(bench: Bench, store: str) -> None:
    done = bench("master", *TINY.split(), "--store", store, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert set(result) == {"schema", "environment", "interrupted", "rows", "memory", "recovery"}
    assert (result["schema"], result["interrupted"], result["memory"], result["recovery"]) == (1, False, None, None)
    rows = result["rows"]
    assert len(rows) == len(CALL_NAMES) * 2 * 2
    for row in rows:
        assert list(row) == list(KEYS)
        for key, kind in KEYS.items():
            assert isinstance(row[key], kind), key
        assert row["complaints"] == []
        assert (row["limit"], row["rounds"], len(row["ratios"])) == ("echo", 2, 2)
        assert row["items_per_s"] == pytest.approx(row["calls_per_s"] * row["hashes"], rel=1e-3)


def test_memory_and_recovery_look_at_every_chunk(bench: Bench) -> None:
    done = bench("master", "--measure", "memory,recovery", "--chunks", "3000", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    memory, recovery = result["memory"], result["recovery"]
    assert (set(memory), set(recovery), result["rows"]) == (MEMORY, RECOVERY, [])
    assert memory["chunks"] == recovery["chunks"] == 3000
    assert memory["verified"]
    assert recovery["verified"]
    assert 0 < recovery["serving_s"] <= recovery["all_hits_s"]


def test_the_table_is_for_people(bench: Bench) -> None:
    done = bench(
        "master", *TINY.split(), "--measure", "rpc,memory,recovery", "--chunks", "1000", "--call", "exists,put"
    )
    assert (done.returncode, done.stderr) == (0, "")
    for text in ["calls/s", "items/s", "echo", "ratio", "PutStart+PutCommit", "bytes per chunk", "after kill -9"]:
        assert text in done.stdout
    assert done.stdout.count(" ok") == 2 * 2 * 2


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for key in {*KEYS, *MEMORY, *RECOVERY}:
        assert f"`{key}`" in page, key


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--call", "exist"], "Try: exists"),
        (["--measure", "speed"], "One of rpc, memory, recovery"),
        (["--hashes", "0"], "not a number"),
        (["--in-flight", "0"], "not a number"),
        (["--chunks", "10"], "1000<=x"),
        (["--store", "etcd"], "'memory', 'sqlite'"),
    ],
)
def test_impossible_options_are_status_2(bench: Bench, arguments: list[str], words: str) -> None:
    done = bench("master", *arguments)
    assert done.returncode == ExitStatus.USAGE
    assert words in done.stderr


def test_wrong_answers_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Exists):
        """Asks a master that forgets chunks after it has said that they are there."""

        def prepare(self) -> None:
            self._loader.remove(self._chains[0])

    monkeypatch.setitem(calls.CALLS, "exists", Forgetful)
    result = CliRunner().invoke(commands.cli, ["master", *TINY.split(), "--hashes", "50", "--call", "exists"])
    assert result.exit_code == ExitStatus.NOT_VERIFIED, result.output
    assert "differ from the first answer" in result.output
    assert "BAD" in result.output


def test_a_million_chunks_would_need_a_thousand_messages() -> None:
    with MasterProcess("memory") as master, Loader(master.address) as loader:
        called: list[str] = []
        honest = loader.call
        loader.call = lambda method, request: (called.append(method), honest(method, request))[1]  # type: ignore[method-assign]
        loader.put(os.urandom(32 * 2000))
        assert sorted(called) == ["PutCommit", "PutCommit", "PutStart", "PutStart"]


@pytest.mark.parametrize("refused", ["PutStart", "PutCommit"])
def test_a_loader_says_which_call_was_refused_and_how(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with MasterProcess("memory") as master, Loader(master.address) as loader:
        honest = loader.call

        def refusing(method: str, request: Any) -> Any:
            reply = honest(method, request)
            if method == refused:
                reply.statuses = bytes([pb.OK, pb.NOT_OWNER, pb.NOT_OWNER])
            return reply

        monkeypatch.setattr(loader, "call", refusing)
        with pytest.raises(BenchError, match=f"did not take every chunk: {refused}: 2 × NOT_OWNER"):
            loader.put(os.urandom(32 * 3))


def test_a_master_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="the master did not start"):
        MasterProcess(f"sqlite:{tmp_path}/nowhere/master.db")


def test_what_was_measured_before_ctrl_c_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = "--call exists --hashes 10 --in-flight 2 --duration 10ms --warmup 0 --rounds 1000"
    terminal = Terminal("master", "--measure", "rpc", *arguments.split(), "--json", str(file))
    interrupt(terminal, file, children=2)  # a master and an echo
