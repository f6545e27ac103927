# SPDX-License-Identifier: Apache-2.0
"""docs/settings.md says what the code says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from moonpool.master import MasterSettings
from moonpool.transfer_engine import EngineSettings, TransferEngine
from moonpool.transfer_engine.settings import EngineOptions

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
BOUNDED = [field for field in fields(EngineSettings) if field.metadata["minimum"] is not None]


def test_the_page_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "settings_reference.py", "-"], check=True, capture_output=True, text=True
    ).stdout
    assert PAGE.read_text(encoding="utf-8") == made, "run: make docs"


@pytest.mark.parametrize(("table", "cls"), [("engine", EngineSettings), ("master", MasterSettings)])
def test_the_file_it_shows_is_the_defaults(tmp_path: Path, table: str, cls: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    text = page[page.index(f"```toml\n[{table}]") :].removeprefix("```toml\n").split("```")[0]
    file = tmp_path / "moonpool.toml"
    file.write_text(text, encoding="utf-8")
    assert cls.load(file=file, environ={}) == cls()


@pytest.mark.parametrize("bound", ["minimum", "maximum"])
@pytest.mark.parametrize("field", BOUNDED, ids=lambda field: field.name)
def test_the_core_accepts_the_bounds_it_shows(field: Field[Any], bound: str) -> None:
    options: EngineOptions = {field.name: field.metadata[bound]}  # type: ignore[misc]
    with TransferEngine("bounds", listen=None, **options) as engine:
        assert engine.stats()["transfers_running"] == 0
