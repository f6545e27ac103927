# SPDX-License-Identifier: Apache-2.0
"""M17.

What people met: a store with 18,000 puts had 0 hits and no error: objects were cut at 4 KiB.

What must happen instead: sizes checked on every write; a self-test when a node joins.

What the self-test finds: tests/store/test_node.py.
"""

from __future__ import annotations

from store_testing import content, key

from moonpool.cluster import LocalCluster
from moonpool.node.selftest import SIZES

EDGES = sorted({size + more for size in (*SIZES, 8192, 1 << 18) for more in (-1, 0, 1) if size + more > 0})


def test_chunks_of_every_awkward_size(cluster: LocalCluster) -> None:
    hashes = [key("m17", size) for size in EDGES]
    values = [content(hash_, size) for hash_, size in zip(hashes, EDGES, strict=True)]
    with cluster.client() as client:
        client.put("m17", hashes, values).require()
        assert list(client.get("m17", hashes)) == values
    with cluster.client() as other:
        assert list(other.get("m17", hashes)) == values
