# SPDX-License-Identifier: Apache-2.0
"""The master's own time."""

from __future__ import annotations

import time

__all__ = ["granted_ms", "now_ms"]


def now_ms() -> int:
    """Return milliseconds of a clock that does not go back, rounded down: whether a time is over."""
    return time.monotonic_ns() // 1_000_000


def granted_ms() -> int:
    """Return the same, rounded up: what every time that is granted counts from, so that none ends early."""
    return -(-time.monotonic_ns() // 1_000_000)
