# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from rdma_lab.inside.links import Links
from rdma_lab.inside.peer import Endpoint


@pytest.fixture
def links() -> Iterator[Links]:
    """The network, to be changed; as it was, and up, after the test."""
    changed = Links()
    try:
        yield changed
    finally:
        changed.restore()


@pytest.fixture
def open_peer() -> Iterator[Callable[..., Endpoint]]:
    """Opens endpoints of devices; closed after the test."""
    with ExitStack() as opened:
        yield lambda device, **options: opened.enter_context(Endpoint(device, **options))
