# SPDX-License-Identifier: Apache-2.0
"""M15.

What people met: a truncated file or a failed disk write was served as a chunk.

What must happen instead: write to a temporary name, fsync, rename; length and checksum checked on read; a bad chunk is
a miss and is dropped.

Here a file has many chunks, so what is written is named only when it is there also after a crash. Disks that give
errors: tests/store/test_slab.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from engine_testing.leaks import eventually
from store_testing import keys
from store_testing.disks import (
    CLIENT,
    SPACE,
    check,
    cluster_of,
    count,
    fill,
    no_failures,
    there_again,
    wait_for_writes,
    write,
)

from moonpool.cluster import LocalCluster
from moonpool.node.slab import BLOCK
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with cluster_of() as made:
        yield made


def test_a_node_that_is_killed_while_it_writes_leaves_nothing_wrong(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=20.0) as client, cluster.client(**CLIENT, timeout=1.0) as writer:
        right = 0
        for round_ in range(2):
            hashes = keys(30, "killed", round_)
            over = threading.Event()
            writing = threading.Thread(target=write, args=(writer, hashes, over))
            writing.start()
            try:
                wait_for_writes(client)
            finally:
                cluster.kill_node(0)
                over.set()
                writing.join()
            cluster.start_node(0)
            assert eventually(lambda: sum(one.state == pb.ACTIVE for one in client.segments()) >= 2, 30)
            assert no_failures(client, hashes)
            right += check(client, hashes).count(Outcome.OK)
        assert right > 0


def test_what_is_damaged_on_the_disk_is_a_miss_and_forgotten(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=20.0) as client:
        hashes = keys(40, "damaged")
        fill(client, hashes)
        cluster.kill_node(0)
        with cluster.slab(0).open("r+b") as file:
            # All of the first half, from within each chunk on; and the second half is not there any more.
            for at in range(16 * BLOCK + 1000, 8 << 20, BLOCK):
                file.seek(at)
                file.write(b"\xff" * 8)
        os.truncate(cluster.slab(0), 8 << 20)
        cluster.start_node(0)
        assert eventually(lambda: client.exists(SPACE, hashes).any(), 30)
        outcomes = check(client, hashes)
        assert set(outcomes) <= {Outcome.MISS, Outcome.FAILED, Outcome.OK}
        assert eventually(lambda: not set(check(client, hashes)) - {Outcome.MISS}, 30)
        assert count(client, "spoilt_items") > 10
        # They can be put again.
        fill(client, hashes[:10])
        there_again(client, hashes[:10])
