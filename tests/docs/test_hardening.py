# SPDX-License-Identifier: Apache-2.0
"""What docs/hardening.md shows works: the examples, and the names of fuzz targets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hardening.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_run(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[number]], check=False, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["run", "wire", "bogus"], ["replay", "bogus", "file"], ["coverage", "bogus"]])
def test_a_fuzz_target_that_does_not_exist_names_the_others(arguments: list[str]) -> None:
    done = subprocess.run(
        [str(ROOT / "tools" / "fuzz.sh"), *arguments], check=False, capture_output=True, text=True, timeout=90, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert 'no fuzz target "bogus"' in done.stderr
    assert "greeter" in done.stderr
