# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench replay``: reading traces, and from the command line to rows."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moonpool.bench import commands
from moonpool.bench.errors import ExitStatus, TraceError
from moonpool.bench.replay import command
from moonpool.bench.replay.simulate import Row
from moonpool.bench.replay.trace import Trace, read_trace


def line(*ids: Any, **other: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": list(ids), **other})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(7, 8, 9), line(7, 8, 5), line(7, 8, 9)]) + "\n")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands.cli, ["replay", *map(str, arguments)])


def test_blocks_are_numbered_by_first_use(file: Path) -> None:
    trace = read_trace(file)
    assert trace.requests == [[0, 1, 2], [0, 1, 3], [0, 1, 2]]
    assert trace.names == [7, 8, 9, 5]
    assert trace.times_ms == [0, 0, 0]
    assert trace.tokens == [(1, 1)] * 3
    assert trace.references == 9


def test_the_first_requests_are_a_trace_of_their_own(file: Path) -> None:
    trace = read_trace(file)
    assert trace.first(1) == Trace([[0, 1, 2]], [7, 8, 9], [0], [(1, 1)])
    assert trace.first(None) == trace.first(3) == trace.first(100) == trace
    document = json.loads(run(file, "--requests", "2", "--json", "-").stdout)
    assert document["trace"] == {"file": "trace.jsonl", "requests": 2, "references": 6, "distinct": 4}


def test_compression_is_recognized_by_content(file: Path) -> None:
    expected = read_trace(file)
    file.write_bytes(gzip.compress(file.read_bytes()))
    assert read_trace(file) == expected


def test_empty_lines_other_keys_and_a_missing_newline_are_nothing_bad(file: Path) -> None:
    file.write_text(f"\n{line(1, 2, turn=3)}\r\n  \n{line(timestamp=1.5)}\n{line(2**70)}")
    assert read_trace(file).requests == [[0, 1], [], [2]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"line 2: not JSON: "),
        ('{"hash_ids": [\xff', r"line 2: not JSON: .*utf-8"),
        ("[" * 100_000, r"line 2: not JSON: "),
        ("[1]", r"line 2: not a JSON object but \[1\]"),
        ("null", r"line 2: not a JSON object but null"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', r"line 2: the key 'hash_ids' is missing"),
        ('{"input_length": 1, "output_length": 1, "hash_ids": []}', r"line 2: the key 'timestamp' is missing"),
        (line(input_length=None), r"line 2: 'input_length' is null, not a whole number of tokens"),
        (line(output_length=-1), r"line 2: 'output_length' is -1, not a whole number of tokens"),
        (line(timestamp="now"), r"line 2: 'timestamp' is \"now\", not a number of milliseconds"),
        (line(timestamp=float("nan")), r"line 2: 'timestamp' is NaN, not a number"),
        (line(timestamp=float("inf")), r"line 2: 'timestamp' is Infinity, not a number"),
        (line(timestamp=10**400), r"line 2: 'timestamp' is 1000.*, not a number of milliseconds from 0 to 10,000"),
        (line(timestamp=1e300), r"line 2: 'timestamp' is 1e\+300, not a number"),
        (line(timestamp=True), r"line 2: 'timestamp' is true, not a number"),
        (line(hash_ids=3), r"line 2: 'hash_ids' is 3, not a list"),
        (line(hash_ids="x" * 100), r"line 2: 'hash_ids' is \"x{59}\.\.\., not a list"),
        (line(1, -2), r"line 2: 'hash_ids'\[1\] is -2, not a whole number from 0"),
        (line(1.0), r"line 2: 'hash_ids'\[0\] is 1\.0, not a whole number from 0"),
        (line(0, 1, True), r"line 2: 'hash_ids'\[2\] is true, not a whole number from 0"),
        (line("1"), r"line 2: 'hash_ids'\[0\] is \"1\", not a whole number from 0"),
    ],
)
def test_a_bad_line_is_named(file: Path, bad: str, message: str) -> None:
    file.write_bytes(f"{line(1)}\n{bad}\n{line(1)}\n".encode("latin-1"))
    with pytest.raises(TraceError, match=message):
        read_trace(file)


@pytest.mark.parametrize(("text", "what"), [("", "no requests"), ("\n\n", "no requests"), (line(), "without blocks")])
def test_a_trace_without_anything(file: Path, text: str, what: str) -> None:
    for content in (text.encode(), gzip.compress(text.encode())):
        file.write_bytes(content)
        with pytest.raises(TraceError, match=what):
            read_trace(file)


def test_damaged_compression_is_said(file: Path) -> None:
    whole = gzip.compress(b"".join(f"{line(number)}\n".encode() for number in range(5000)))
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut off, somewhere behind line \d{3}.*Try: fetch it again"):
        read_trace(file)
    file.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(TraceError, match=r"damaged, somewhere behind line"):
        read_trace(file)
    file.write_bytes(whole + b"rest")
    with pytest.raises(TraceError, match=r"damaged, somewhere behind line 5000: Not a gzipped file"):
        read_trace(file)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")


def test_rows_as_json(file: Path, tmp_path: Path) -> None:
    result = run(file, "--capacity", "2", "--json", "-")
    assert result.exit_code == ExitStatus.OK
    document = json.loads(result.stdout)
    assert document == {
        "schema": 1,
        "trace": {"file": "trace.jsonl", "requests": 3, "references": 9, "distinct": 4},
        "interrupted": False,
        "rows": [
            {"policy": "lru", "capacity_blocks": 2, "hit_ratio": 0.0},
            {"policy": "s3fifo", "capacity_blocks": 2, "hit_ratio": 0.111111},
            {"policy": "prefix", "capacity_blocks": 2, "hit_ratio": 0.444444},
            {"policy": "optimum", "capacity_blocks": 2, "hit_ratio": 0.444444},
        ],
    }
    result = run(file, "--capacity", "2", "--json", tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == document
    assert "0.4444" in result.stdout


def test_lists_and_repetitions_are_one_sweep(file: Path) -> None:
    arguments = ["--capacity", "3,2", "--capacity", "100", "--capacity", "2", "--policy", "prefix,bound"]
    result = run(file, *arguments, "--policy", "lru", "--json", "-")
    rows = [(row["capacity_blocks"], row["policy"]) for row in json.loads(result.stdout)["rows"]]
    assert rows == [(capacity, policy) for capacity in (3, 2, 100) for policy in ("prefix", "bound", "lru")]


def test_the_table_has_the_default_sweep(file: Path) -> None:
    result = run(file)
    assert result.exit_code == ExitStatus.OK
    words = [text.split() for text in result.stdout.splitlines()]
    assert result.stdout.startswith("trace.jsonl: 3 requests, 9 blocks of 512 tokens, 4 different\n")
    assert words[2] == ["capacity", "lru", "s3fifo", "prefix", "optimum"]
    assert [row[0] for row in words[3:]] == ["1,000", "5,000", "10,000", "30,000", "50,000"]
    assert {ratio for row in words[3:] for ratio in row[1:]} == {"0.5556"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "'0' is not a number from 1 to"),
        (["--capacity", "5,-1"], "'-1' is not a number from 1 to"),
        (["--capacity", "many"], "'many' is not a number"),
        (["--policy", "lfu"], "'lfu' is not there. Try: lru"),
        (["--plot", "picture"], "does not say which kind of picture"),
    ],
)
def test_command_lines_that_make_no_sense(file: Path, arguments: list[str], message: str) -> None:
    result = run(file, *arguments)
    assert result.exit_code == ExitStatus.USAGE
    assert message in " ".join(result.output.split())


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "is a directory")):
        result = run(path)
        assert result.exit_code == ExitStatus.USAGE
        assert message in " ".join(result.output.replace("│", " ").split())


def test_a_bad_trace_fails_without_rows(file: Path) -> None:
    file.write_text(f"{line(1)}\n{line(-1)}\n")
    result = run(file, "--json", "-")
    assert (result.exit_code, result.stdout) == (ExitStatus.FAILED, "")
    assert "trace.jsonl: line 2: 'hash_ids'[0] is -1" in result.stderr


def test_an_interruption_shows_what_is_complete(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[Row]:
        yield Row("lru", 2, 0.25)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "rows_of", interrupted)
    result = run(file, "--capacity", "2", "--policy", "lru,prefix")
    assert result.exit_code == ExitStatus.INTERRUPTED
    assert result.stdout.splitlines()[-1].split() == ["2", "0.2500", "–"]
    assert "interrupted" in result.stderr
    document = json.loads(run(file, "--json", "-").stdout)
    assert document["interrupted"] is True
    assert len(document["rows"]) == 1


def test_the_rows_can_be_drawn(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert run(file, "--capacity", "1,2,3", "--plot", tmp_path / "replay.png").exit_code == ExitStatus.OK
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    result = run(file, "--plot", tmp_path / "replay.png")
    assert result.exit_code == ExitStatus.USAGE
    assert "pip install 'moonpool[plot]'" in " ".join(result.output.split())
