# SPDX-License-Identifier: Apache-2.0
"""How much is done, and what has been found so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from moonpool.bench.gpu.driver import Driver
from moonpool.bench.hardware.steps import Check, Result
from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import TransportUnavailableError

__all__ = ["FULL", "MIB", "QUICK", "Plan", "Run"]

MIB: Final = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        nbytes: memory of each kind on each side.
        pieces: lengths of pieces whose bytes are looked at, and how many of each.
        rounds: of a rate. The figure is their median.
        round_s: seconds of a round.
        judged: whether rounds are long enough for a ratio to mean something.
    """

    nbytes: int
    pieces: tuple[tuple[int, int], ...]
    rounds: int
    round_s: float
    judged: bool


FULL: Final = Plan(
    128 * MIB,
    ((1, 1), (63, 7), (4096, 1000), (4099, 257), (65_536, 200), (MIB + 1, 9), (16 * MIB + 5, 2), (64 * MIB, 1)),
    7, 0.15, True,
)  # fmt: skip
QUICK: Final = Plan(4 * MIB, ((1, 1), (63, 7), (4096, 30), (4099, 9), (MIB + 1, 1)), 1, 0.0, False)


class Run:
    """One run of the check: what it has found so far."""

    def __init__(self, driver: Driver, plan: Plan, until: float) -> None:
        self.driver = driver
        self.plan = plan
        self.checks: list[Check] = []
        self.rows: list[dict[str, Any]] = []
        self._until = until

    def note(self, check: str, result: Result, figure: str = "", limit: str = "", detail: str = "") -> None:
        """Keep a line of the report."""
        self.checks.append(Check(check, result, figure, limit, detail))

    def make(self, name: str, body: Callable[[], None]) -> None:
        """Do one part. What goes wrong with it is a line, and the next part is made."""
        if time.monotonic() > self._until:
            self.note(name, "skipped", detail="no time is left: more --seconds")
            return
        try:
            body()
        except TransportUnavailableError as error:
            self.note(name, "skipped", detail=str(error))
        except MoonpoolError as error:
            self.note(name, "failed", detail=str(error))

    def pieces(self, seed: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]]:
        """Yield offsets here, offsets there and the length of pieces, at places in any order."""
        random = np.random.default_rng(seed)
        for nbytes, count in self.plan.pieces:
            part = self.plan.nbytes // count
            here, there = (random.permutation(count) * part + random.integers(0, part - nbytes + 1) for _ in range(2))
            yield here.astype(np.int64), there.astype(np.int64), nbytes
