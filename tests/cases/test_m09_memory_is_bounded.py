# SPDX-License-Identifier: Apache-2.0
"""M9.

What people met: master ran out of memory at some tens of millions of chunks.

What must happen instead: bytes per chunk are a published metric with a bound; at the cap new puts are refused, the
process lives.

Of the master alone: `test_at_the_cap_puts_are_refused_and_the_master_lives` in tests/master/test_chunks.py; bytes per
chunk: `mooncake-bench master`.
"""

from __future__ import annotations

from store_testing import keys

from moonpool.cluster import local_cluster
from moonpool.store_client import IndexFullError, Outcome

CAP = 500


def test_at_the_cap_puts_are_refused_by_a_typed_error_until_there_is_room() -> None:
    with (
        local_cluster(nodes=1, dram="4MiB", master_options={"chunks_max": str(CAP)}) as cluster,
        cluster.client() as client,
    ):
        many = keys(CAP + 100)
        results = client.put("a", many, [b"x"] * len(many))
        assert results.count(Outcome.OK) == CAP
        assert all(isinstance(error, IndexFullError) for error in results.errors.values())
        assert client.remove("a", many[:100]).count(Outcome.OK) == 100
        more = keys(100, "more")
        client.put("a", more, [b"x"] * 100).require()
