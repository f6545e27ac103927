# SPDX-License-Identifier: Apache-2.0
"""Tests of `inside/` run in an emulated machine; see `items.py`."""

from __future__ import annotations

import pytest
from rdma_lab import items


def pytest_configure(config: pytest.Config) -> None:
    items.install(config)
