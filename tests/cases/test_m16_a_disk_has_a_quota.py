# SPDX-License-Identifier: Apache-2.0
"""M16.

What people met: a disk tier without a quota filled the node's disk.

What must happen instead: a quota is compulsory; ENOSPC evicts and carries on.

More than the file system has, and one that is full when it is written to: tests/store/test_slab.py.
"""

from __future__ import annotations

import pytest
from store_testing import keys
from store_testing.disks import CLIENT, check, cluster_of, count, fill

from moonpool.errors import ConfigError
from moonpool.node import NodeSettings
from moonpool.node.slab import BLOCK
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome


def test_a_disk_without_a_quota_is_none() -> None:
    for text in ("/mnt/nvme", "/mnt/nvme:", "/mnt/nvme:all"):
        with pytest.raises(ConfigError):
            NodeSettings.load({"ssd": text})


def test_the_quota_is_kept() -> None:
    with cluster_of() as cluster, cluster.client(**CLIENT) as client:
        for round_ in range(3):
            fill(client, keys(40, "many", round_))
        assert count(client, "disk_evicted_bytes") > 0
        assert cluster.slab(0).stat().st_blocks * 512 <= (32 << 20) + 17 * BLOCK
        (disk,) = [one for one in client.segments() if one.medium == pb.DISK]
        assert disk.used_bytes <= 32 << 20
        assert Outcome.OK in check(client, keys(40, "many", 2))
