# SPDX-License-Identifier: Apache-2.0
"""Comparisons: whose turn it is, what the ratios are, and that nobody who fails takes the others along."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from moonpool.bench import commands, jsonform
from moonpool.bench.compare import CompareObserver, CompareOptions, CompareRow, Comparison
from moonpool.bench.compare_report import print_comparison
from moonpool.bench.contender import Contender, Measured
from moonpool.bench.environment import describe_run
from moonpool.bench.errors import BenchError, ExitStatus, UsageError
from moonpool.bench.measure import Percentiles, Window
from moonpool.bench.plot import plot_comparison
from moonpool.bench.sweep import Sweep
from moonpool.bench.work import Work

BLOCK = 1 << 20


def work(**changes: Any) -> Work:
    fields: dict[str, Any] = {
        "transport": "tcp",
        "op": "read",
        "block_bytes": BLOCK,
        "batch": 1,
        "order": "sequential",
        "threads": 1,
        "lanes": None,
        "footprint_bytes": 16 * BLOCK,
    }
    return Work(**(fields | changes))


class Fake(Contender):
    """Moves blocks at given rates, one for each window, and fails where the rate is a text."""

    def __init__(self, name: str, rates: list[float | str], log: list[str]) -> None:
        self.name = name
        self.version = None if name in ("moonpool", "sockets") else "1.2.3"
        self._rates = rates
        self._log = log

    def open(self, work: Work, window: int) -> None:
        self._log.append(f"open {self.name}")
        if self._rates and self._rates[0] == "no":
            raise BenchError("not installed", hint="pip install it")

    def measure(self, window: int, warmup: float, duration: float) -> Measured:
        self._log.append(self.name)
        rate = self._rates.pop(0)
        if isinstance(rate, str):
            raise BenchError(rate)
        taken = Window(1.0, 1000, int(rate * 1e9), Percentiles(10.0, 20.0, 30.0), (0.5, 0.25))
        return Measured(taken, ["target: 1 blocks are wrong"] if rate == 6.66 else [], 2, "tcp")

    def close_row(self) -> None:
        self._log.append(f"close {self.name}")

    def close(self) -> None:
        self._log.append(f"end {self.name}")

    def kill(self) -> None:
        self._log.append(f"kill {self.name}")


class Watched(CompareObserver):
    def __init__(self) -> None:
        self.rows: list[CompareRow] = []
        self.left_out: list[tuple[str, str]] = []

    def row_ends(self, row: CompareRow) -> None:
        self.rows.append(row)

    def skipped(self, name: str, reason: str) -> None:
        self.left_out.append((name, reason))


class Run:
    def __init__(self, rates: dict[str, list[float | str]], rounds: int, works: list[Work] | None = None) -> None:
        self.log: list[str] = []
        self.watched = Watched()
        self.error: BenchError | None = None
        options = CompareOptions(list(rates), "tcp", rounds, 0.1, 0.01)
        self.comparison = Comparison(
            options, self.watched, lambda name, transport, memory_bytes: Fake(name, rates[name], self.log)
        )
        try:
            with self.comparison:
                self.comparison.run(works or [work()])
        except BenchError as error:
            self.error = error

    @property
    def rows(self) -> list[CompareRow]:
        return self.watched.rows


def test_ratios_are_medians_of_windows_of_the_same_round() -> None:
    """The machine is half as fast in the second round: that is no news about either engine."""
    run = Run({"moonpool": [4.0, 2.0, 6.0], "mooncake": [1.0, 0.5, 3.0], "nixl": [2.0, 4.0, 1.0]}, 3)
    (row,) = run.rows
    assert row.entries["mooncake"].ratios(row.reference) == [4.0, 4.0, 2.0]
    assert (row.ratio("mooncake"), row.ratio("nixl"), row.ratio("moonpool")) == (4.0, 2.0, None)
    assert row.entries["moonpool"].result.gbytes_per_s == 4.0
    assert run.comparison.versions["nixl"] == "1.2.3"


def test_everyone_is_first_in_turn() -> None:
    run = Run({"moonpool": [1.0] * 3, "sockets": [1.0] * 3, "nixl": [1.0] * 3}, 3)
    turns = [name for name in run.log if " " not in name]
    assert turns == ["moonpool", "sockets", "nixl", "sockets", "nixl", "moonpool", "nixl", "moonpool", "sockets"]
    assert run.log[-3:] == ["end moonpool", "end sockets", "end nixl"]


def test_who_does_not_come_up_is_named_and_left_out() -> None:
    run = Run({"moonpool": [1.0] * 4, "nixl": ["no"]}, 2, [work(), work(op="write")])
    assert run.error is None
    assert run.comparison.skipped == {"nixl": "not installed. Try: pip install it"}
    assert run.watched.left_out == [("nixl", "not installed. Try: pip install it")]
    assert run.log.count("open nixl") == 1
    assert [list(row.entries) for row in run.rows] == [["moonpool", "nixl"], ["moonpool"]]
    assert [entry.result.rounds for row in run.rows for entry in row.entries.values()] == [2, 0, 2]


def test_who_fails_in_a_row_is_started_anew_for_the_next() -> None:
    rates: list[float | str] = [2.0, "it fell over", 2.0, 2.0]
    run = Run({"moonpool": [4.0] * 4, "nixl": rates}, 2, [work(), work(op="write")])
    first, second = (row.entries["nixl"] for row in run.rows)
    assert (first.failure, first.result.rounds) == ("it fell over", 1)
    assert (second.failure, second.result.rounds) == ("", 2)
    assert [row.ratio("nixl") for row in run.rows] == [2.0, 2.0]
    assert run.comparison.skipped == {}


def test_who_keeps_failing_is_left_out() -> None:
    rates: list[float | str] = [1.0, "a", 1.0, "b", 1.0, "c"]
    run = Run({"moonpool": [1.0] * 8, "nixl": rates}, 2, [work(batch=batch) for batch in (1, 2, 4, 8)])
    assert run.comparison.skipped == {"nixl": "c"}
    assert "nixl" not in run.rows[3].entries


def test_without_moonpool_there_is_nothing_to_compare() -> None:
    run = Run({"moonpool": [1.0, "gone"], "nixl": [1.0, 1.0]}, 2)
    assert str(run.error) == "gone"
    assert [row.entries["nixl"].result.rounds for row in run.rows] == [2], "what was measured is shown"
    assert run.log[-1] == "kill nixl"


def test_nobody_left_is_a_failure_that_names_them_all() -> None:
    run = Run({"mooncake": ["no"], "nixl": ["no"]}, 1)
    assert "mooncake: not installed" in str(run.error)
    assert "nixl: not installed" in str(run.error)


def shown(run: Run, width: int = 120) -> str:
    parameters = {"rounds": 2, "duration": 0.1, "warmup": 0.01, "fixed": {"lanes": "auto"}}
    file = io.StringIO()
    print_comparison(
        Console(file=file, width=width), describe_run(parameters), run.rows, run.comparison.skipped
    )  # fmt: skip
    return file.getvalue()


def test_the_table_says_what_it_comes_down_to() -> None:
    works = [work(), work(op="write", order="random", batch=16, threads=2)]
    rates: dict[str, list[float | str]] = {
        "moonpool": [4.0] * 4,
        "mooncake": [1.0, 1.0, 8.0, 8.0],
        "nixl": [6.66, 2.0, 2.0, "it fell over"],
    }
    text = shown(Run({**rates, "sockets": ["no"]}, 2, works))
    assert "moonpool / mooncake: at least 0.50 (tcp write 1MiB × 16 random, 2 threads), median 2.25" in text
    assert "not slower in 1 of 2 rows" in text
    assert "BAD" in text
    assert "NOT VERIFIED: nixl: tcp read 1MiB × 1: round 1, target: 1 blocks are wrong" in text
    assert "failed: nixl: tcp write 1MiB × 16 random: it fell over" in text
    assert "skipped: sockets: not installed. Try: pip install it" in text


def test_four_backends_fit_into_120_columns() -> None:
    works = [work(op=op, order=order, threads=threads, batch=128) for op, order, threads in
             (("read", "sequential", 1), ("write", "random", 64))]  # fmt: skip
    names = ("moonpool", "sockets", "mooncake", "nixl")
    text = shown(Run({name: [12.345] * 4 for name in names}, 2, works))
    assert max(map(len, text.split("Every byte")[0].splitlines())) <= 120


def test_the_json_form_has_a_row_for_each_backend() -> None:
    run = Run({"moonpool": [4.0, 4.0], "mooncake": [1.0, "it fell over"], "nixl": ["no"]}, 2)
    document = jsonform.comparison({}, run.rows, run.comparison.skipped)
    assert document["skipped"] == [{"backend": "nixl", "reason": "not installed. Try: pip install it"}]
    ours, theirs, missing = document["rows"]
    assert (ours["backend"], ours["moonpool_ratio"], ours["moonpool_ratios"]) == ("moonpool", None, [])
    assert (theirs["moonpool_ratio"], theirs["moonpool_ratios"], theirs["rounds"]) == (4.0, [4.0], 1)
    assert (theirs["failure"], theirs["cpu_s_per_gb"], theirs["path"]) == ("it fell over", 0.75, "tcp")
    assert (missing["gbytes_per_s"], missing["rounds"]) == (None, 0)
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for key in {*document, *theirs}:
        assert f"`{key}`" in page or f'"{key}"' in page, key


def test_a_comparison_can_be_drawn(tmp_path: Path) -> None:
    works = [work(), work(block_bytes=4096), work(op="write")]
    plot_comparison(Run({"moonpool": [1.0] * 3, "nixl": [1.0, 2.0, "gone"]}, 1, works).rows, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_batches_that_do_not_fit_are_made_smaller_and_rows_come_once() -> None:
    sweep = Sweep(["tcp"], ["read"], [BLOCK, 8 * BLOCK], [1, 16, 128], ["sequential", "random"], threads=[1, 2])
    rows = sweep.works_within(16 * BLOCK, 64 * BLOCK)
    assert len(set(rows)) == len(rows)
    large = [(row.threads, row.batch, row.order) for row in rows if row.block_bytes == 8 * BLOCK]
    assert large == [
        (1, 1, "sequential"), (1, 8, "sequential"), (1, 8, "random"),
        (2, 1, "sequential"), (2, 4, "sequential"), (2, 4, "random"),
    ]  # fmt: skip
    assert {row.footprint_bytes for row in rows} == {16 * BLOCK, 32 * BLOCK, 64 * BLOCK}
    with pytest.raises(UsageError, match="do not fit"):
        sweep.works_within(BLOCK, 4 * BLOCK)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--backends moonpool,nixxl", "Try: nixl"),
        ("--backends memcpy", "--over auto"),
        ("--backends moonpool,nixl,moonpool", "moonpool is given more than once"),
        ("--backends sockets,socket", "sockets is given more than once"),
        ("--block-size 4KiB --footprint 1KiB", "do not fit"),
        ("--block-size 5", "8-byte words"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(arguments: str, said: str) -> None:
    result = CliRunner().invoke(commands.cli, ["compare", *arguments.split()])
    assert result.exit_code == ExitStatus.USAGE
    assert said in " ".join(result.output.split())
