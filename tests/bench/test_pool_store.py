# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench store`` with real pools, in the shortest windows there are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_testing import Terminal, interrupt
from click.testing import CliRunner, Result

import moonpool
from moonpool.bench import commands
from moonpool.bench.errors import ExitStatus
from moonpool.bench.measure import Window
from moonpool.bench.pool import store_command, windows
from moonpool.bench.pool.place import PoolPlace
from moonpool.store_client.packing import HEADER_BYTES, Records
from moonpool.transfer_engine import TransferEngine

Bench = Callable[..., subprocess.CompletedProcess[str]]

TINY = "--block-size 4KiB,64KiB --batch 1,4 --footprint 512KiB --dram 16MiB --duration 2ms --warmup 1ms --rounds 2"
ONE_ROW = "--block-size 4KiB --batch 2 --footprint 64KiB --dram 16MiB --duration 1ms --warmup 0 --rounds 1"
#: What was got keeps its room for as long as a lease: a short one lets the pool be empty soon.
SHORT_LEASE = {"MOONPOOL_STORE_CLIENT_LEASE": "500ms"}
# Of another pool than that which is started.
OF_ANOTHER = {"MOONPOOL_STORE_CLIENT_TLS_CA": "elsewhere.pem", "MOONPOOL_STORE_CLIENT_SECRET": "another"}

KEYS = {
    "backend": str,
    "op": str,
    "block_bytes": int,
    "batch": int,
    "replicas": int,
    "threads": int,
    "memory": str,
    "located": str,
    "path": str,
    "gbytes_per_s": float,
    "chunks_per_s": float,
    "p50_us": float,
    "p99_us": float,
    "p999_us": float,
    "limit": str,
    "limit_gbytes_per_s": float,
    "limit_p50_us": float,
    "limit_p99_us": float,
    "ratio": float,
    "ratios": list,
    "rounds": int,
    "footprint_bytes": int,
    "verified": bool,
    "complaints": list,
}
POOL = {"master", "started", "nodes", "segments", "capacity_bytes", "used_bytes", "store"}


def test_the_json_form_is_the_documented_one(bench: Bench) -> None:
    done = bench(
        "store", *TINY.split(), "--nodes", "2", "--replicas", "1,2", "--memory", "registered,buffers",
        "--store", "sqlite", "--json", "-", environ=SHORT_LEASE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert set(result) == {"schema", "environment", "interrupted", "rows"}
    assert (result["schema"], result["interrupted"]) == (1, False)
    pool = result["environment"]["pool"]
    assert set(pool) == POOL
    assert (pool["started"], pool["nodes"], pool["store"]) == (True, 2, "sqlite")
    rows = result["rows"]
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    for row in rows:
        assert list(row) == list(KEYS)
        for key, kind in KEYS.items():
            assert isinstance(row[key], kind), key
        assert row["verified"]
        assert (row["complaints"], row["rounds"], len(row["ratios"])) == ([], 2, 2)
        assert row["chunks_per_s"] * row["block_bytes"] == pytest.approx(row["gbytes_per_s"] * 1e9, rel=0.5)
    assert {(row["op"], row["replicas"], row["memory"]) for row in rows} == {
        (op, replicas, memory) for op in ("put", "get") for replicas in (1, 2) for memory in ("registered", "buffers")
    }


def test_gets_that_ask_and_gets_that_know_are_rows_of_their_own(bench: Bench) -> None:
    done = bench(
        "store", *ONE_ROW.split(), "--op", "put,get", "--block-size", "4KiB", "--footprint", "64KiB",
        "--located", "asked,known", "--json", "-", environ=SHORT_LEASE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert [(row["op"], row["located"]) for row in rows] == [("put", "asked"), ("get", "asked"), ("get", "known")]
    assert all(row["verified"] for row in rows)


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for key in {*KEYS, *POOL, "pool"}:
        assert f"`{key}`" in page, key


def test_the_table_is_for_people(bench: Bench) -> None:
    done = bench("store", *TINY.split(), "--threads", "1,2", environ=SHORT_LEASE | OF_ANOTHER)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ["GB/s", "chunks/s", "p99", "limit", "ratio", "put", "get", "4KiB", "64KiB", "1 node", "thr"]:
        assert text in done.stdout
    assert done.stdout.count(" ok") == 2 * 2 * 2 * 2
    assert max(len(line) for line in done.stdout.splitlines()) <= 120


def test_a_pool_that_runs_is_left_as_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with moonpool.local_cluster(nodes=2, dram="16MiB", master_options={"http": "none"}) as cluster:
        client = cluster.client()
        client.put("other", [bytes(32)], [b"kept"]).require()
        done = bench(
            "store", *ONE_ROW.split(), "--block-size", "4KiB", "--footprint", "64KiB", "--master", cluster.master,
            "--secret", cluster.secret, "--replicas", "2", "--json", "-", environ=SHORT_LEASE,
        )  # fmt: skip
        # What lends is said by the pool.
        assert done.returncode == ExitStatus.USAGE
        assert "--dram is about a pool that is started" in done.stderr
        arguments = [value for value in ONE_ROW.split() if value not in ("--dram", "16MiB")]
        done = bench(
            "store", *arguments, "--master", cluster.master, "--secret", cluster.secret, "--replicas", "2",
            "--json", "-", environ=SHORT_LEASE,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        result = json.loads(done.stdout)
        assert result["environment"]["pool"]["started"] is False
        assert [row["verified"] for row in result["rows"]] == [True, True]
        assert client.get("other", [bytes(32)])[0] == b"kept"
        assert client.master_stats()["index"]["chunks"] == 1


def test_another_secret_is_status_3(bench: Bench) -> None:
    with moonpool.local_cluster(nodes=1, dram="16MiB", master_options={"http": "none"}) as cluster:
        done = bench("store", "--master", cluster.master, "--secret", "another")
    assert done.returncode == ExitStatus.FAILED
    assert "secret" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "puts"], "Try: put"),
        (["--block-size", "12"], "8-byte words"),
        (["--footprint", "64KiB"], "do not fit into a footprint"),
        (["--replicas", "2"], "--nodes 2"),
        (["--secret", "s"], "--secret belongs to --master"),
        (["--master", "here:1", "--nodes", "2"], "--nodes is about a pool that is started"),
    ],
)
def test_impossible_options_are_status_2(bench: Bench, arguments: list[str], words: str) -> None:
    done = bench("store", *arguments)
    assert done.returncode == ExitStatus.USAGE
    assert words in done.stderr


def test_no_room_is_status_3_and_says_what_to_do(bench: Bench) -> None:
    arguments = "--op put --block-size 1MiB --batch 8 --footprint 16MiB --dram 4MiB --rounds 1"
    done = bench("store", *arguments.split())
    assert done.returncode == ExitStatus.FAILED
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- verification


class Spoiled(PoolPlace):
    """A pool in which a byte of the first chunk changes after it was put, by somebody else's engine."""

    def locate(self, hashes: bytes) -> Records:
        found = super().locate(hashes)
        target = self.target(int(found["segment"][0, 0]))
        with TransferEngine("vandal", listen=None, secret=self.client._core.settings.secret) as engine:
            byte = engine.allocate(1)
            peer = engine.connect(target.peer.address)
            region = peer.regions.wait(target.region.name, 10.0)
            place = int(found["offset"][0, 0]) + HEADER_BYTES + 5
            engine.read(peer, byte, region, 0, place, 1).wait()
            np.asarray(byte)[:] ^= 1
            engine.write(peer, byte, region, 0, place, 1).wait()
        return found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands.cli, ["store", *ONE_ROW.split(), *arguments], env=SHORT_LEASE)


def test_puts_that_lie_wrong_in_the_pool_are_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_command, "PoolPlace", Spoiled)
    result = invoke("--op", "put")
    assert result.exit_code == ExitStatus.NOT_VERIFIED, result.output
    assert "put: 1 chunks differ in the pool" in result.output
    assert "BAD" in result.output


def test_damage_that_the_client_finds_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_command, "PoolPlace", Spoiled)
    result = invoke("--op", "get")
    assert result.exit_code == ExitStatus.NOT_VERIFIED, result.output
    assert "a get found damage" in result.output
    assert "BAD" in result.output


@pytest.mark.parametrize("op", ["put", "get"])
def test_bytes_that_are_wrong_here_are_status_1(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    memory: dict[str, Any] = {}
    lend, run = PoolPlace.memory, windows.CallSide.run

    def lent(self: PoolPlace, name: str, nbytes: int) -> Any:
        memory[name] = lend(self, name, nbytes)
        return memory[name]

    def spoiling(self: Any, seconds: float) -> Window:
        window = run(self, seconds)
        memory["own"][0][5000] ^= 1
        return window

    monkeypatch.setattr(PoolPlace, "memory", lent)
    monkeypatch.setattr(windows.CallSide, "run", spoiling)
    result = invoke("--op", op)
    assert result.exit_code == ExitStatus.NOT_VERIFIED, result.output
    assert "differ here" in result.output


# ---------------------------------------------------------------- Ctrl-C


def test_what_was_measured_before_ctrl_c_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = "--block-size 64KiB --footprint 4MiB --dram 32MiB --duration 20ms --warmup 0 --rounds 1000"
    terminal = Terminal("store", "--op", "get", *arguments.split(), "--json", str(file), environ=SHORT_LEASE)
    interrupt(terminal, file, children=2)  # a master and a node
