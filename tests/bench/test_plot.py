# SPDX-License-Identifier: Apache-2.0
"""A picture of a run, when matplotlib is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench import commands
from moonpool.bench.errors import ExitStatus
from moonpool.bench.measure import Window
from moonpool.bench.plot import plot
from moonpool.bench.results import RowResult
from moonpool.bench.work import Work


def row(op: str, block: int, *, order: str = "sequential", engine: bool = True, limit: bool = True) -> RowResult:
    window = Window(1.0, 10, block * 10, None)
    return RowResult(
        Work("tcp", op, block, 1, order, 1, None, 1 << 30),
        "moonpool",
        engine=[window] if engine else [],
        limits=[window] if limit else [],
    )


@pytest.mark.parametrize(
    "rows",
    [
        [row("read", 4096), row("read", 1 << 20), row("write", 4096, order="random"), row("write", 4096)],
        [row("read", 4096, limit=False)],
        [row("read", 4096, engine=False)],
    ],
)
def test_every_kind_of_run_can_be_drawn(rows: list[RowResult], tmp_path: Path) -> None:
    plot(rows, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    plot(rows, tmp_path / "run.svg")
    assert "<svg" in (tmp_path / "run.svg").read_text()


def test_what_cannot_be_drawn_or_written_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(commands.cli, ["transfer", *arguments])
        assert result.exit_code == ExitStatus.USAGE
        return " ".join(result.output.split())

    assert "does not say which kind of picture" in refused("--plot", str(tmp_path / "run"))
    assert "No such file or directory" in refused("--json", str(tmp_path / "nowhere" / "run.json"))
    assert "Is a directory" in refused("--json", str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert "pip install 'moonpool[plot]'" in refused("--plot", str(tmp_path / "run.png"))
