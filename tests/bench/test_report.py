# SPDX-License-Identifier: Apache-2.0
"""The table shows every digit, and fits where it should."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console

from moonpool.bench.environment import describe_run
from moonpool.bench.measure import Percentiles, Window
from moonpool.bench.report import print_report
from moonpool.bench.results import RowResult
from moonpool.bench.work import Work

WINDOW = Window(1.0, 1000, 12_345_678_901, Percentiles(49_876.5, 59_876.5, 69_876.5), (12.3, 4.56))


def row(**changes: Any) -> RowResult:
    fields: dict[str, Any] = {
        "transport": "tcp",
        "op": "read",
        "block_bytes": 64 << 10,
        "batch": 1024,
        "order": "sequential",
        "threads": 1,
        "lanes": None,
        "footprint_bytes": 1 << 30,
    }
    work = Work(**(fields | changes))
    return RowResult(work, "moonpool", "sockets-acked", 2, 2, [WINDOW], [WINDOW])


def printed(rows: list[RowResult], width: int) -> list[str]:
    parameters = {"rounds": 1, "duration": 1.0, "warmup": 0.2, "fixed": {"order": "sequential"}}
    file = io.StringIO()
    print_report(Console(file=file, width=width), describe_run(parameters), rows)
    return file.getvalue().splitlines()


def test_everything_swept_at_once_fits_into_120_columns() -> None:
    swept = itertools.product(["read", "write"], ["sequential", "random"], [1, 64], [1, 64])
    rows = [row(op=op, order=order, threads=threads, lanes=lanes) for op, order, threads, lanes in swept]
    lines = printed(rows, 120)
    assert max(map(len, lines)) <= 120
    assert "…" not in "".join(lines)
    assert sum("random" in line for line in lines) == 8


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_digit_is_left_out_in_a_narrow_terminal(width: int) -> None:
    (line,) = [line for line in printed([row()], width) if line.startswith("tcp")]
    shown = [
        "64KiB",
        "1024",
        "12.3",
        "1.02M",
        "49,876",
        "59,876",
        "69,876",
        "1.00+0.37",
        "12.3",
        "49,876",
        "1.00",
        "ok",
    ]
    assert line.split()[2:] == shown


def test_groups_are_named_once() -> None:
    lines = [
        line for line in printed([row(), row(batch=1), row(op="write"), row(op="write", batch=1)], 120) if "KiB" in line
    ]
    assert [line.split()[:2] for line in lines] == [["tcp", "read"], ["64KiB", "1"], ["write", "64KiB"], ["64KiB", "1"]]


def test_what_each_rail_carried_stands_below() -> None:
    rows = [row(transport="rdma"), row(transport="rdma", op="write")]
    rows[0].rail_bytes, rows[1].rail_bytes = (
        {"mlx5_0:1": 900_000_000, "mlx5_1:1": 0},
        {"mlx5_0:1": 0, "mlx5_1:1": 10**8},
    )
    assert "rails: mlx5_0:1 900 MB (90%) · mlx5_1:1 100 MB (10%)" in printed(rows, 120)


def test_a_limit_that_is_missing_is_said_once() -> None:
    rows = [row(transport="rdma"), row(transport="rdma", op="write")]
    for one in rows:
        one.limit, one.no_limit = None, "no perftest. Try: apt-get install perftest"
    assert printed(rows, 120).count("no limit: no perftest. Try: apt-get install perftest") == 1


def test_wrong_bytes_are_shouted() -> None:
    bad = row()
    bad.complaints = ["engine, round 1, target: 1 of 16 blocks are wrong; byte 7"]
    text = " ".join(" ".join(printed([bad, row(op="write")], 200)).split())
    assert "BAD" in text
    assert "NOT VERIFIED: tcp read 64KiB × 1024: engine, round 1, target: 1 of 16 blocks are wrong; byte 7" in text
