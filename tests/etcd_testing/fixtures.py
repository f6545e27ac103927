# SPDX-License-Identifier: Apache-2.0
"""One etcd for the tests of a process, in which each has keys of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etcd_testing import Cluster
from moonpool.master.store import EtcdOptions

__all__ = ["etcd", "etcd_options"]


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One member, which nobody kills."""
    with Cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def etcd_options(etcd: Cluster) -> Callable[..., EtcdOptions]:
    """Makes options of a store that nobody else has."""
    prefix = uuid.uuid4().hex

    def make(**more: Any) -> EtcdOptions:
        return etcd.options(prefix, **more)

    return make
