# SPDX-License-Identifier: Apache-2.0
"""Tests of `inside/` run in an emulated machine; see `items.py`."""

from __future__ import annotations

import sys

import pytest

from rdma_lab.items import Lab, Plugin, StandIn, start

# Now: the tests' own conftest.py comes next, and imports pyverbs. Last, so that a real one comes first.
sys.meta_path.append(StandIn())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(Lab(start)), "rdma_lab")
