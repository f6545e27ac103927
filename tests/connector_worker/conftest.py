# SPDX-License-Identifier: Apache-2.0
"""A pool that the tests share, and what a worker has of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worker_testing.rig import Rig

from moonpool.cluster import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[LocalCluster]:
    """For tests that break nothing."""
    with local_cluster(nodes=2, dram="128MiB") as cluster:
        yield cluster


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def rigs(shared_cluster: LocalCluster, namespace: str) -> Iterator[Callable[..., Rig]]:
    """Makes rigs in one namespace, and closes them."""
    made: list[Rig] = []

    def make(cluster: LocalCluster = shared_cluster, **options: Any) -> Rig:
        made.append(Rig(cluster, namespace, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
