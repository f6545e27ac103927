# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this suite, and the option that repeats a run."""

from __future__ import annotations

import secrets

import pytest
from engine_testing.fixtures import no_leaks, open_engine, open_pair, pair, transport

__all__ = ["no_leaks", "open_engine", "open_pair", "pair", "transport"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seed", type=int, help="seed of the chaos test; a run that failed has printed its own")


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Another seed in each run. Shown when the test fails."""
    given: int | None = request.config.getoption("--chaos-seed")
    seed = secrets.randbelow(1_000_000) if given is None else given
    print(f"repeat with: --chaos-seed={seed}")  # noqa: T201 - pytest shows it with the failure
    return seed
