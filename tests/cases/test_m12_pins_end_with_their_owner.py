# SPDX-License-Identifier: Apache-2.0
"""M12.

What people met: pins and read locks leaked by aborted requests until the hit rate was 0; a double unpin freed someone
else's.

What must happen instead: a pin is a handle with an owner (session); it ends with the session; a leak gauge returns to
0.

A thousand owners, half of them killed: tests/master/test_crowd.py. Handles of others: tests/master/test_sessions.py.
"""

from __future__ import annotations

import json
import time

import pytest
from engine_testing.leaks import eventually
from store_testing import keys

from moonpool.cluster import LocalCluster
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import ChunkInUseError, StoreClient


def pins(client: StoreClient) -> int:
    stats = json.loads(client._core.call("Stats", pb.StatsRequest(), time.monotonic() + 30).json)
    return int(stats["pins"])


def test_pins_end_once_each_and_with_their_client(cluster: LocalCluster) -> None:
    hashes = keys(3, "m12")
    with cluster.client() as client:
        client.put("m12", hashes, [b"x"] * 3).require()
        other = cluster.client()
        mine, its = client.pin("m12", hashes), other.pin("m12", hashes)
        mine.release()
        mine.release()
        assert pins(client) == 1
        with pytest.raises(ChunkInUseError):
            client.remove("m12", hashes).require()
        other.close()
        assert eventually(lambda: pins(client) == 0)
        client.remove("m12", hashes).require()
        assert len(its) == 3
