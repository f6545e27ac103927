# SPDX-License-Identifier: Apache-2.0
"""A pool that the tests of a process share, and names of their own for what they put into it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import StoreClient


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[LocalCluster]:
    """For tests that break nothing."""
    with local_cluster(nodes=2, dram="256MiB") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(shared_cluster: LocalCluster) -> StoreClient:
    return shared_cluster.client()


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex
