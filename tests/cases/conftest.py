# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_testing.fixtures import no_leaks, open_engine, open_pair, pair, transport
from master_testing.fixtures import join, start_master

from moonpool.cluster import LocalCluster, local_cluster

__all__ = ["join", "no_leaks", "open_engine", "open_pair", "pair", "start_master", "transport"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A pool for cases that break nothing."""
    with local_cluster(nodes=2, dram="64MiB") as its:
        yield its
