# SPDX-License-Identifier: Apache-2.0
"""docs/settings.md says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moonpool.transfer_engine import EngineSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "settings_reference.py", "-"], check=True, capture_output=True, text=True
    ).stdout
    assert PAGE.read_text(encoding="utf-8") == made, "run: make docs"


def test_the_file_it_shows_is_the_defaults(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    file = tmp_path / "moonpool.toml"
    file.write_text(text, encoding="utf-8")
    assert EngineSettings.load(file=file, environ={}) == EngineSettings()
