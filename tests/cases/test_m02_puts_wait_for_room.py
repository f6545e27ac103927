# SPDX-License-Identifier: Apache-2.0
"""M2.

What people met: a put with no room failed at once although eviction would have made room; holes in the prefix stayed
for ever.

What must happen instead: a put waits (bounded) for eviction; refusal is a typed, retryable error with a retry-after.

Of the master alone: `test_a_put_waits_for_room_that_a_lease_holds` and what follows it in
tests/master/test_chunks.py.
"""

from __future__ import annotations

import threading

import pytest
from store_testing import content, keys

from moonpool.cluster import local_cluster
from moonpool.store_client import NoSpaceError

SIZE, FIT = 60_000, 16


def test_a_put_waits_for_what_is_pinned_and_says_when_to_try_again() -> None:
    with (
        local_cluster(nodes=1, dram="1MiB", master_options={"put_begin": "20s"}) as cluster,
        cluster.client() as client,
    ):
        old, new = keys(FIT, "old"), keys(4, "new")
        client.put("a", old, [content(hash_, SIZE) for hash_ in old]).require()
        pin = client.pin("a", old)
        values = [content(hash_, SIZE) for hash_ in new]
        with cluster.client(space_wait=0.1) as hurried, pytest.raises(NoSpaceError) as caught:
            hurried.put("a", new, values).require()
        assert caught.value.retryable
        assert caught.value.retry_after > 0
        ends = threading.Timer(0.3, pin.release)
        ends.start()
        client.put("a", new, values).require()
        ends.join()
