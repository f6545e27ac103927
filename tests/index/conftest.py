# SPDX-License-Identifier: Apache-2.0
"""An index with two segments on two hosts."""

from __future__ import annotations

import pytest
from index.calls import MIB, POLICIES

from moonpool._index import ChunkIndex


@pytest.fixture(params=POLICIES)
def index(request: pytest.FixtureRequest) -> ChunkIndex:
    made = ChunkIndex(policy=request.param, chunks_max=1000, epoch=3)
    made.add_segment(1, MIB, 1, 0, 0)
    made.add_segment(2, MIB, 2, 0, 0)
    return made
