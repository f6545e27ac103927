# SPDX-License-Identifier: Apache-2.0
"""M11.

What people met: a batch call was N single calls inside.

What must happen instead: one RPC, one transaction per group.

Transactions: `test_batches_are_one_call_of_the_index` in tests/master/test_chunks.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from store_testing import keys

from moonpool.cluster import LocalCluster

MANY = 1000


def test_a_thousand_chunks_are_one_call_of_each_kind(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[str] = Counter()
    with cluster.client() as client:
        link = client._core.link
        call = link.call

        def counted(method: str, request: Any, deadline: float) -> Any:
            made[method] += 1
            return call(method, request, deadline)

        monkeypatch.setattr(link, "call", counted)
        hashes = keys(MANY, "m11")
        client.put("m11", hashes, [b"x" * 100] * MANY).require()
        assert client.exists("m11", hashes).all()
        assert client.match_prefix("m11", hashes) == MANY
        assert client.get("m11", hashes).ok
    for name in ("PutStart", "PutCommit", "Exists", "MatchPrefix", "Locate"):
        assert made[name] == 1, made
