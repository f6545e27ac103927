# SPDX-License-Identifier: Apache-2.0
"""The README's examples do what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize(
    ("number", "output"), [(0, "b'request 42'\n"), (1, "<GetResults 8 OK, 1 MISS>\n")], ids=["engine", "pool"]
)
def test_the_example_runs(number: int, output: str, tmp_path: Path) -> None:
    example = EXAMPLES[number]
    assert len(example.strip().splitlines()) <= 20
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")
