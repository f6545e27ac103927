# SPDX-License-Identifier: Apache-2.0
"""M3.

What people met: a get that outlived its lease returned other bytes.

What must happen instead: lease and generation checked after the bytes came, checksum where a CPU touched them: never
wrong bytes, with a lease of 50 ms and an artificially slow get.

For seconds, with many chunks and both ways to get: tests/store/test_leases.py.
"""

from __future__ import annotations

from store_testing import content, keys

from moonpool.cluster import local_cluster
from moonpool.store_client import Outcome
from moonpool.transfer_engine.testing import Faults, FaultyEngine

SIZE, FIT, LEASE = 60_000, 16, 0.05


def test_a_get_whose_space_is_given_to_others_meanwhile_is_a_miss() -> None:
    with (
        local_cluster(nodes=1, dram="1MiB", master_options={"lease_max": "50ms"}) as cluster,
        cluster.client() as writer,
        FaultyEngine(Faults(delay=1.0, delay_seconds=0.5), listen=None, secret=cluster.secret.encode()) as slow,
        cluster.client(engine=slow, lease=LEASE, timeout=30.0) as reader,
    ):
        for round_ in range(3):
            old, new = keys(FIT, round_, "old"), keys(FIT, round_, "new")
            writer.put("a", old, [content(hash_, SIZE) for hash_ in old]).require()
            late = writer_busy = reader.get_async("a", old)
            while not writer_busy.done():
                writer.put("a", new, [content(hash_, SIZE) for hash_ in new])
            found = late.result()
            assert set(found.outcomes) == {Outcome.MISS}
            assert all(value is None for value in found)
