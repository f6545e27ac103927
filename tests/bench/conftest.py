# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it, in windows too short to measure anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

Bench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tiny() -> list[str]:
    """Options of ``transfer`` that end at once."""
    options = "--block-size 4KiB,64KiB --batch 1,4 --footprint 1MiB --duration 2ms --warmup 1ms --rounds 2"
    return options.split()


@pytest.fixture
def bench() -> Bench:
    """Run ``mooncake-bench`` with warnings as errors."""

    def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "moonpool.bench.cli", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **(environ or {})},
        )

    return run
