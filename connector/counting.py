# SPDX-License-Identifier: Apache-2.0
"""What the threads of a worker count, until the next step takes it along."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

from moonpool.errors import MoonpoolError

__all__ = ["OBSERVED_MAX", "Counts"]

#: Observations of one kind between two steps; what is beyond that is counted, but not observed.
OBSERVED_MAX: Final = 1024

_log = logging.getLogger("moonpool.connector")


class Counts:
    """Counters and observations by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._observed: dict[str, list[float]] = {}
        self._said: set[str] = set()

    def add(self, **numbers: int) -> None:
        """Add to counters."""
        with self._lock:
            self._numbers.update(numbers)

    def observe(self, name: str, value: float) -> None:
        """Add one observation, of a histogram."""
        with self._lock:
            values = self._observed.setdefault(name, [])
            if len(values) < OBSERVED_MAX:
                values.append(value)

    def complain(self, what: str, error: MoonpoolError) -> None:
        """Count an error, and log the first one of its kind: a pool that is ill has many."""
        with self._lock:
            self._numbers["errors"] += 1
            first = error.code not in self._said
            self._said.add(error.code)
        if first:
            _log.warning("moonpool: %s (further errors %s are counted only): %s", what, error.code, error)

    def take(self) -> dict[str, int | list[float]]:
        """Return what has come since the last time, empty when nothing has."""
        if not self._numbers and not self._observed:
            return {}
        with self._lock:
            taken: dict[str, int | list[float]] = {**self._numbers, **self._observed}
            self._numbers, self._observed = Counter(), {}
        return taken
