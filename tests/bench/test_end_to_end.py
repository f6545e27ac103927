# SPDX-License-Identifier: Apache-2.0
"""The whole command with real engines and a real second process, in the shortest windows there are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.bench.errors import ExitStatus
from moonpool.transfer_engine import probe

#: The core of schema 1, in the order of docs/bench.md. A key that disappears needs another schema.
KEYS = {
    "backend": str,
    "transport": str,
    "op": str,
    "block_bytes": int,
    "batch": int,
    "order": str,
    "lanes": (int, type(None)),
    "threads": int,
    "gbytes_per_s": float,
    "ops_per_s": float,
    "p50_us": float,
    "p99_us": float,
    "p999_us": float,
    "cpu_s_per_gb": float,
    "limit": str,
    "limit_gbytes_per_s": float,
    "ratio": float,
    "verified": bool,
}
EXTRAS = {
    "cpu_s_per_gb_initiator",
    "cpu_s_per_gb_target",
    "limit_width",
    "limit_p50_us",
    "limit_p99_us",
    "ratios",
    "rounds",
    "footprint_bytes",
    "complaints",
    "memory",
    "depth",
    "path",
    "no_limit",
    "rail_bytes",
    "tuning",
}
ENVIRONMENT = {
    "time",
    "host",
    "cpu",
    "cores",
    "memory_bytes",
    "kernel",
    "load",
    "governor",
    "transparent_hugepage",
    "tcp_congestion_control",
    "tcp_rmem",
    "tcp_wmem",
    "python",
    "numpy",
    "moonpool",
    "revision",
    "engine_settings",
    "parameters",
    "target",
}


Bench = Callable[..., subprocess.CompletedProcess[str]]
Measured = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(bench: Bench, tiny: list[str]) -> Measured:
    """Run tiny windows, and return the JSON form."""

    def run(*arguments: str) -> dict[str, Any]:
        done = bench("transfer", *tiny, *arguments, "--json", "-")
        assert (done.returncode, done.stderr) == (0, "")
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def test_lanes_that_are_not_given_come_from_the_environment(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header says that the setting is in force, so it has to be."""
    monkeypatch.setenv("MOONPOOL_ENGINE_LANES", "3")
    document = measured("--transport", "tcp", "--op", "read", "--only", "engine")
    assert document["environment"]["engine_settings"]["lanes"] == 3
    assert {row["lanes"] for row in document["rows"]} == {3}


def test_the_limit_alone_is_named_by_its_own_name(measured: Measured) -> None:
    rows = measured("--transport", "tcp,local", "--op", "read", "--only", "limit")["rows"]
    assert {(row["transport"], row["backend"]) for row in rows} == {("tcp", "sockets"), ("local", "memcpy")}


def test_the_json_form_is_the_documented_one(measured: Measured) -> None:
    result = measured("--transport", "tcp,local", "--order", "sequential,random")
    assert set(result) == {"schema", "environment", "interrupted", "rows"}
    assert (result["schema"], result["interrupted"]) == (1, False)
    assert set(result["environment"]) == ENVIRONMENT
    assert result["environment"]["parameters"]["rounds"] == 2
    rows = result["rows"]
    assert len(rows) == 2 * 2 * 2 * 4
    for row in rows:
        assert list(row)[: len(KEYS)] == list(KEYS)
        assert set(row) == set(KEYS) | EXTRAS
        for key, kind in KEYS.items():
            assert isinstance(row[key], kind), key
        assert row["verified"]
        assert row["complaints"] == []
        assert (row["memory"], row["path"]) == ("registered", row["transport"])
        assert (row["no_limit"], row["rail_bytes"], set(row["tuning"].values())) == (None, None, {None})
        assert (row["rounds"], len(row["ratios"])) == (2, 2)
        assert row["ratio"] == pytest.approx(sum(row["ratios"]) / 2, rel=1e-4)
        assert row["ops_per_s"] * row["block_bytes"] == pytest.approx(row["gbytes_per_s"] * 1e9, rel=0.5)
        assert row["cpu_s_per_gb"] == pytest.approx(
            row["cpu_s_per_gb_initiator"] + row["cpu_s_per_gb_target"], rel=1e-4
        )
    tcp = [row for row in rows if row["transport"] == "tcp"]
    assert {(row["limit"], row["lanes"] is None) for row in tcp} == {("sockets-acked", False)}
    assert all(row["limit_width"] == row["lanes"] for row in tcp)
    local = [row for row in rows if row["transport"] == "local"]
    assert {(row["limit"], row["lanes"], row["cpu_s_per_gb_target"]) for row in local} == {("memcpy", None, 0.0)}


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for key in {*KEYS, *EXTRAS, *ENVIRONMENT}:
        assert f"`{key}`" in page, key


def test_threads_and_lanes_are_used(measured: Measured) -> None:
    rows = measured("--transport", "tcp", "--threads", "1,3", "--lanes", "2")["rows"]
    assert {(row["threads"], row["lanes"], row["limit_width"]) for row in rows} == {(1, 2, 2), (3, 2, 3)}


@pytest.mark.parametrize("only", [None, "limit"])
def test_shared_memory_stands_beside_the_limit_of_its_kind(measured: Measured, only: str | None) -> None:
    (shm,) = (transport for transport in probe() if transport.name == "shm")
    if not shm.available:
        pytest.skip(f"shm: {shm.reason}")
    arguments = ["--transport", "shm", "--memory", "allocated,registered", "--order", "sequential,random"]
    rows = measured(*arguments, *(["--only", only] if only else []))["rows"]
    assert len(rows) == 2 * 2 * 2 * 4
    limits = {"allocated": "memcpy", "registered": "process_vm"}
    for row in rows:
        assert (row["limit"], row["rounds"], row["verified"]) == (limits[row["memory"]], 2, True)
        assert row["backend"] == ("moonpool" if only is None else row["limit"])
        assert row["path"] == ("shm" if only is None else None)


def test_a_copying_limit_has_as_many_threads_as_it_is_given(measured: Measured) -> None:
    rows = measured("--transport", "local", "--op", "read", "--threads", "1,3", "--limit-threads", "2")["rows"]
    assert {(row["threads"], row["limit_width"]) for row in rows} == {(1, 2), (3, 3)}


@pytest.mark.parametrize("only", ["engine", "limit"])
def test_one_of_the_two_alone(measured: Measured, only: str) -> None:
    for row in measured("--only", only)["rows"]:
        assert (row["gbytes_per_s"] is None) == (only == "limit")
        assert (row["limit_gbytes_per_s"] is None) == (only == "engine")
        assert (row["ratio"], row["rounds"], row["verified"]) == (None, 2, True)


def test_a_stream_has_a_rate_and_no_times(measured: Measured) -> None:
    for row in measured("--transport", "tcp", "--limit", "stream")["rows"]:
        assert (row["limit"], row["limit_p50_us"]) == ("sockets-stream", None)
        assert row["ratio"] > 0


def test_the_table_is_for_people(bench: Bench, tiny: list[str], tmp_path: Path) -> None:
    done = bench("transfer", *tiny, "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png"))
    assert (done.returncode, done.stderr) == (0, "")
    for text in ["GB/s", "p99.9", "CPU s/GB", "limit", "ratio", "tcp", "local", "read", "write", "4KiB", "64KiB"]:
        assert text in done.stdout
    assert done.stdout.count(" ok") == len(json.loads((tmp_path / "run.json").read_text())["rows"])
    assert max(len(line) for line in done.stdout.splitlines()) <= 120
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_settings_of_the_engine_that_were_changed_are_shown(bench: Bench, tiny: list[str]) -> None:
    done = bench(
        "transfer", *tiny, "--transport", "tcp", "--op", "read", "--only", "engine",
        environ={"MOONPOOL_ENGINE_SPIN_US": "7"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "spin_us 7" in done.stdout


def test_settings_of_the_engine_are_swept(measured: Measured) -> None:
    rows = measured("--transport", "tcp", "--op", "read", "--slice", "auto,64KiB", "--spin-us", "0,50")["rows"]
    found = {(row["tuning"]["slice_bytes"], row["tuning"]["spin_us"]) for row in rows}
    assert found == {(None, 0), (None, 50), (65536, 0), (65536, 50)}
    assert all(row["verified"] for row in rows)


def test_several_transfers_under_way_move_the_right_bytes(measured: Measured) -> None:
    rows = measured("--transport", "tcp,local", "--depth", "1,4", "--limit", "stream", "--footprint", "1MiB")["rows"]
    assert {(row["transport"], row["depth"]) for row in rows} == {("tcp", 1), ("tcp", 4), ("local", 1), ("local", 4)}
    assert all(row["verified"] for row in rows)


def test_a_failing_engine_is_status_3_and_says_why(bench: Bench, tiny: list[str]) -> None:
    done = bench("transfer", *tiny, "--transport", "tcp", environ={"MOONPOOL_ENGINE_SPIN_US": "often"})
    assert done.returncode == ExitStatus.FAILED
    assert "spin_us" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_memory_that_is_not_there_is_status_3(bench: Bench) -> None:
    done = bench("transfer", "--footprint", "4096TiB")
    assert done.returncode == ExitStatus.FAILED
    assert "a smaller --footprint" in done.stderr


def test_a_missing_numpy_is_one_line(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('gone', name='numpy')\n", encoding="utf-8")
    done = bench("doctor", environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == ExitStatus.FAILED
    assert done.stderr == "mooncake-bench: numpy is not installed. Try: pip install 'moonpool[bench]'\n"
