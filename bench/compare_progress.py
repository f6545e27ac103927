# SPDX-License-Identifier: Apache-2.0
"""What the user is told while rows are compared."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.bench.compare import CompareObserver, CompareRow
from moonpool.bench.perform import StatusLine, say
from moonpool.bench.work import Work

__all__ = ["CompareProgress"]


class CompareProgress(CompareObserver):
    """Keeps the rows, and says what is measured.

    Args:
        line: where it says so.
        rounds: of each row.
        text_of: says which row it is.
    """

    def __init__(self, line: StatusLine, rounds: int, text_of: Callable[[Work], str]) -> None:
        self.rows: list[CompareRow] = []
        self._line = line
        self._rounds = rounds
        self._text_of = text_of
        self._where = ""

    def row_begins(self, number: int, count: int, work: Work) -> None:
        """Note the row."""
        self._where = f"row {number} of {count}: {self._text_of(work)}"

    def window_begins(self, number: int, name: str) -> None:
        """Show the round, and whose turn it is."""
        self._line.show(f"{self._where}, round {number} of {self._rounds}: {name}")

    def row_ends(self, row: CompareRow) -> None:
        """Keep the row."""
        self.rows.append(row)

    def skipped(self, name: str, reason: str) -> None:
        """Say so."""
        self._line.show("")
        say(f"{name} is left out: {reason}", style="yellow")
