# SPDX-License-Identifier: Apache-2.0
"""The option that repeats a run."""

from __future__ import annotations

import secrets

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pool-seed", type=int, help="seed of the run; one that failed has printed its own")


@pytest.fixture
def pool_seed(request: pytest.FixtureRequest) -> int:
    """Another seed in each run. Shown when the test fails."""
    given: int | None = request.config.getoption("--pool-seed")
    seed = secrets.randbelow(1_000_000) if given is None else given
    print(f"repeat with: --pool-seed={seed}")  # noqa: T201 - pytest shows it with the failure
    return seed
