# SPDX-License-Identifier: Apache-2.0
"""docs/stats.md names every counter, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moonpool.transfer_engine import TransferEngine

ROOT = Path(__file__).parents[2]


def names(stats: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_counter_is_documented() -> None:
    with TransferEngine("counted") as engine:
        counters = {re.sub(r"^paths\.\w+\.", "paths.<transport>.", name) for name in names(engine.stats())}
    page = (ROOT / "docs" / "stats.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)) == counters
