# SPDX-License-Identifier: Apache-2.0
"""Stores that are closed with the test, over an etcd that all tests share or one that is the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_testing import Cluster
from etcd_testing.fixtures import etcd, etcd_options
from master_testing.fixtures import join, start_master

from moonpool.master.store import EtcdOptions, EtcdStore

__all__ = ["etcd", "etcd_options", "join", "start_master"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts an etcd of its own."""
    clusters: list[Cluster] = []

    def start_(members: int = 1, *more: str, **options: Any) -> Cluster:
        folder = tmp_path / f"etcd{len(clusters)}"
        folder.mkdir()
        clusters.append(Cluster(folder, members, more, **options))
        return clusters[-1]

    yield start_
    for cluster in clusters:
        cluster.kill()


@pytest.fixture
def opened(start: Callable[..., Cluster]) -> Iterator[Callable[[EtcdOptions], EtcdStore]]:
    """Opens stores, and closes them before the etcd ends."""
    stores: list[EtcdStore] = []

    def open_(options: EtcdOptions) -> EtcdStore:
        store = EtcdStore(options)
        store.open()
        stores.append(store)
        return store

    yield open_
    for store in stores:
        store.close()
