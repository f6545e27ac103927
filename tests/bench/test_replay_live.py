# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench replay --speed``: a trace through a live pool."""

from __future__ import annotations

import collections
import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_traces
from bench_testing import Terminal
from click.testing import CliRunner, Result

import moonpool
from moonpool.bench import commands
from moonpool.bench.errors import ExitStatus
from moonpool.bench.replay import live, live_report, serving
from moonpool.bench.replay.hashes import content_of, hashes_of
from moonpool.bench.replay.serving import Served, Serving, Totals
from moonpool.bench.replay.simulate import POLICIES
from moonpool.bench.replay.trace import Trace
from moonpool.store_client.errors import NoSpaceError

KEYS = {
    "schema",
    "environment",
    "trace",
    "interrupted",
    "speed",
    "clients",
    "block_bytes",
    "seconds",
    "requests",
    "blocks",
    "hits",
    "hit_ratio",
    "put_blocks",
    "vanished_blocks",
    "dropped_blocks",
    "bytes_got",
    "bytes_put",
    "late_us",
    "match_us",
    "get_us",
    "put_us",
    "request_us",
    "errors",
    "verified",
    "complaints",
    "timeline",
}


def write(file: Path, requests: list[list[int]], every_ms: float = 10.0) -> None:
    lines = [
        json.dumps({"timestamp": number * every_ms, "input_length": 1, "output_length": 1, "hash_ids": ids})
        for number, ids in enumerate(requests)
    ]
    file.write_text("\n".join(lines))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write(path, replay_traces.chats(5, 60, live=8))
    return path


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(commands.cli, ["replay", str(file), *arguments])


def test_hits_are_what_a_pool_with_room_for_all_has(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_TLS_CA", "of-another-pool.pem")
    requests = replay_traces.chats(5, 60, live=8)
    trace = replay_traces.trace(requests)
    pool = POLICIES["lru"](trace, 10**6)
    hits = [pool.request(request) for request in trace.requests]
    arguments = ["--speed", "100", "--clients", "1", "--block-size", "4KiB", "--dram", "64MiB", "--json", "-"]
    result = run(file, *arguments, "--plot", str(tmp_path / "live.png"))
    assert result.exit_code == ExitStatus.OK, result.output
    document = json.loads(result.stdout)
    assert set(document) == KEYS
    assert (document["requests"], document["blocks"], document["hits"]) == (60, trace.references, sum(hits))
    assert document["put_blocks"] == trace.references - sum(hits)
    assert (document["errors"], document["verified"], document["vanished_blocks"]) == ({}, True, 0)
    assert document["bytes_got"] == 4096 * sum(hits)
    assert sum(part["hits"] for part in document["timeline"]) == sum(hits)
    assert document["environment"]["pool"]["started"]
    for name in ("late_us", "match_us", "get_us", "put_us", "request_us"):
        assert document[name]["p50"] <= document[name]["p99"] <= document[name]["max"]
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")


def test_a_pool_that_runs_is_left_as_it_was(file: Path) -> None:
    with moonpool.local_cluster(nodes=1, dram="1MiB", master_options={"http": "none"}) as cluster:
        client = cluster.client()
        result = run(
            file, "--speed", "1000", "--master", cluster.master, "--secret", cluster.secret, "--requests", "30"
        )  # fmt: skip
        assert client.master_stats()["index"]["chunks"] == 0
    # There is room for a few blocks only: what is evicted is put again, and all that is got is right.
    assert result.exit_code in (ExitStatus.OK, ExitStatus.FAILED), result.output
    assert "30 requests in" in result.stdout
    assert "NOT VERIFIED" not in result.output


def test_requests_come_at_their_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write(file, [[1], [1, 2], [1, 2, 3]], every_ms=3000.0)
    result = run(file, "--speed", "10", "--json", "-")
    assert result.exit_code == ExitStatus.OK, result.output
    document = json.loads(result.stdout)
    assert document["seconds"] >= 0.6
    assert document["hits"] == 3


def test_who_comes_later_in_the_file_is_not_due_earlier() -> None:
    trace = Trace([[0], [1], [2]], [7, 8, 9], [2000.0, 1000.0, 4000.0])
    due = live._Due(trace, 1000.0)
    assert [due.next() for _ in range(4)] == [(0.0, [0]), (0.0, [1]), (0.002, [2]), None]


def test_what_is_due_in_a_thousand_years_can_be_waited_for() -> None:
    due = live._Due(Trace([[0], [1]], [7, 8], [0.0, 1e16]), 0.001)
    assert due.next() == (0.0, [0])
    threading.Timer(0.1, due.stop.set).start()
    assert due.next() is None


def test_wrong_bytes_are_status_1(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(hashes: Any, nbytes: int) -> Any:
        content = content_of(hashes, nbytes)
        content[:, 7] ^= counted["calls"] % 2
        counted["calls"] += 1
        return content

    counted: collections.Counter[str] = collections.Counter()
    monkeypatch.setattr(serving, "content_of", wrong)
    result = run(file, "--speed", "1000", "--clients", "1", "--requests", "20")
    assert result.exit_code == ExitStatus.NOT_VERIFIED, result.output
    assert "has other bytes than were put" in result.stdout


def test_errors_are_counted_by_type_and_status_3(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NoSpaceError("no room")

    monkeypatch.setattr(live.StoreClient, "put", full)
    result = run(file, "--speed", "1000", "--requests", "10")
    assert result.exit_code == ExitStatus.FAILED
    assert f"failed: {NoSpaceError.default_code}: 10 times" in result.stdout


def test_what_finds_no_room_is_counted_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second request is larger than the pool, and does not go on where what follows could not be matched.
    file = tmp_path / "trace.jsonl"
    write(file, [[1], list(range(10, 60)), [1]], every_ms=1000.0)
    monkeypatch.setattr(serving, "_PIECE_BYTES", 20 * (64 << 10))
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_SPACE_WAIT", "50ms")
    result = run(file, "--speed", "1", "--block-size", "64KiB", "--dram", "2MiB", "--json", "-")
    assert result.exit_code == ExitStatus.OK, result.output
    document = json.loads(result.stdout)
    assert document["errors"] == {}
    assert document["put_blocks"] + document["dropped_blocks"] in (41, 42)
    assert 5 <= document["dropped_blocks"] <= 10


def test_every_block_has_bytes_of_its_own() -> None:
    hashes = hashes_of([1, 2, 2**70])
    assert (hashes == hashes_of([1, 2, 2**70])).all()
    content = content_of(hashes, 64)
    assert content.shape == (3, 64)
    words = content.view(np.uint64)
    assert all(len(set(column)) == 3 for column in words.T.tolist())


def test_a_timeline_has_every_request_once() -> None:
    served = [Served(due / 7, 0.0, 0.1, 0.0, 0.1, 4, 1, 3) for due in range(100)]
    parts = live_report.timeline(Totals(served=served))
    assert len(parts) == 60
    assert (sum(part.requests for part in parts), sum(part.hits for part in parts)) == (100, 100)
    assert live_report.timeline(Totals()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dram 1GiB", "--dram belongs to --speed"),
        ("--speed 0", "'0' is not a number from 0.001 to 1e+09"),
        ("--speed 1e-300", "'1e-300' is not a number from"),
        ("--speed nan", "'nan' is not a number from"),
        ("--speed inf", "'inf' is not a number from"),
        ("--speed fast", "'fast' is not a number from"),
        ("--speed 1 --capacity 5", "simulated pools"),
        ("--speed 1 --policy lru", "simulated pools"),
        ("--speed 1 --secret s", "--secret belongs to --master"),
        ("--speed 1 --master here:1 --nodes 2", "--nodes is about a pool that is started"),
        ("--speed 1 --block-size 12", "not a multiple of 8"),
    ],
)
def test_impossible_options_are_status_2(file: Path, arguments: str, words: str) -> None:
    result = run(file, *arguments.split())
    assert result.exit_code == ExitStatus.USAGE
    assert words in result.output


@pytest.mark.parametrize(("what", "gone"), [("SIGINT", False), ("SIGTERM", False), ("SIGINT", True)])
def test_ctrl_c_shows_what_was_replayed_and_leaves_nothing(tmp_path: Path, what: str, gone: bool) -> None:
    file, found = tmp_path / "trace.jsonl", tmp_path / "run.json"
    write(file, [[number] for number in range(1000)], every_ms=100.0)
    with moonpool.local_cluster(nodes=1, dram="16MiB") as cluster:
        pool = ("--master", cluster.master, "--secret", cluster.secret)
        timeout = {"MOONPOOL_STORE_CLIENT_TIMEOUT": "500ms"}
        terminal = Terminal("replay", str(file), "--speed", "1", *pool, "--json", str(found), environ=timeout)
        terminal.wait_for("3/1000")
        if gone:
            cluster.kill_master()
        terminal.send(signal.Signals[what])
        status, output = terminal.ended()
        assert status == ExitStatus.INTERRUPTED
        assert gone or cluster.client(staging_bytes="1MiB").master_stats()["index"]["chunks"] == 0
    assert "blocks were hits" in output
    document = json.loads(found.read_text())
    assert document["requests"] >= 3
    assert document["interrupted"]


def test_a_pool_that_is_gone_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, serve = tmp_path / "trace.jsonl", Serving.serve
    write(file, [[number] for number in range(1000)], every_ms=100.0)
    monkeypatch.setattr(serving, "_GONE_SECONDS", 1.0)
    monkeypatch.setattr(live, "_REMOVE_SECONDS", 0.2)
    monkeypatch.setenv("MOONPOOL_STORE_CLIENT_TIMEOUT", "200ms")

    def killing(one: Serving, due: float, late: float, blocks: list[int]) -> None:
        if blocks == [3]:
            cluster.kill_master()
        serve(one, due, late, blocks)

    monkeypatch.setattr(Serving, "serve", killing)
    with moonpool.local_cluster(nodes=1, dram="16MiB") as cluster:
        result = run(file, "--speed", "1", "--master", cluster.master, "--secret", cluster.secret, "--json", "-")
    assert result.exit_code == ExitStatus.FAILED
    assert "the pool is gone or of no use: nothing came of the last" in result.stderr
    assert "what was put may still be in the pool" in result.stderr
    document = json.loads(result.stdout)
    assert 3 < document["requests"] < 100
    # Who does not answer is asked once for each request.
    assert sum(document["errors"].values()) <= document["requests"]
    assert not document["interrupted"]


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for key in {*KEYS, "begin_s"}:
        assert f"`{key}`" in page or f'"{key}"' in page, key
