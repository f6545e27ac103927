# SPDX-License-Identifier: Apache-2.0
"""M1.

What people met: existence probes renewed the leases of everything: over the watermark, 649 evictions tried, none
done, 12,160 allocation failures.

What must happen instead: a probe never extends anything.

Of the master alone: `test_probes_extend_nothing` in tests/master/test_chunks.py.
"""

from __future__ import annotations

from store_testing import content, keys

from moonpool.cluster import local_cluster

SIZE, FIT = 200_000, 50


def test_a_pool_whose_every_chunk_is_asked_for_all_the_time_still_takes_new_ones() -> None:
    with local_cluster(nodes=1, dram="10MiB") as cluster, cluster.client() as client:
        old = keys(FIT, "old")
        client.put("a", old, [content(hash_, SIZE) for hash_ in old]).require()
        for round_ in range(15):
            client.exists("a", old)
            new = keys(FIT // 5, "new", round_)
            client.put("a", new, [content(hash_, SIZE) for hash_ in new]).require()
            client.exists("a", new)
        # Twice the capacity of others came, so none of the old ones is there.
        assert not client.exists("a", old).any()
