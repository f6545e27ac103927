# SPDX-License-Identifier: Apache-2.0
"""M4.

What people met: a put of another value under a committed key returned success and was dropped; `get` returned empty
bytes both for a miss and for a failed transfer.

What must happen instead: a put under a committed key says "already there" in its per-item result; another length (or
other bytes under `verify=True`) is `ChunkConflictError`; miss and failure are two different, typed outcomes.

Of the master alone: `test_a_put_under_a_committed_key_says_so` in tests/master/test_chunks.py.
"""

from __future__ import annotations

import pytest
from store_testing import key

from moonpool.cluster import LocalCluster
from moonpool.store_client import ChunkConflictError, Outcome
from moonpool.transfer_engine.testing import Faults, FaultyEngine


def test_a_put_under_a_committed_key(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        client.put("m4", [key(4)], [b"abc"]).require()
        again = client.put("m4", [key(4), key(5)], [b"abc", b"new"])
        assert again.outcomes == bytes([Outcome.ALREADY, Outcome.OK])
        for other, options in ((b"abcd", {}), (b"xbc", {"verify": True})):
            with pytest.raises(ChunkConflictError):
                client.put("m4", [key(4)], [other], **options).require()
        assert client.get("m4", [key(4)])[0] == b"abc"


def test_a_miss_and_a_failure_are_two_outcomes(cluster: LocalCluster) -> None:
    with (
        FaultyEngine(Faults(), listen=None, secret=cluster.secret.encode()) as engine,
        cluster.client(engine=engine) as client,
    ):
        client.put("m4", [key(0)], [b"x"]).require()
        engine.set_faults(Faults(error=1.0))
        found = client.get("m4", [key(0), key(1)])
        assert found.outcomes == bytes([Outcome.FAILED, Outcome.MISS])
        assert (found[0], found[1]) == (None, None)
        assert set(found.errors) == {0}
