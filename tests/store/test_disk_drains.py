# SPDX-License-Identifier: Apache-2.0
"""What becomes of disks when their node is to leave, or comes back with one of another size."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from engine_testing.leaks import eventually
from store_testing import keys
from store_testing.disks import CLIENT, OPTIONS, SPACE, check, cluster_of, count, fill, on_disk, there_again

from moonpool.cli import cli
from moonpool.cluster import LocalCluster
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import InvalidRequestError
from moonpool.store_client import Outcome, StoreClient


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with cluster_of(master_options={**OPTIONS, "segment_grace": "60s"}) as made:
        yield made


def segment_of(client: StoreClient, medium: int) -> pb.Segment:
    (found,) = [one for one in client.segments() if one.medium == medium]
    return found


def drained(cluster: LocalCluster, *arguments: str, status: int = 0) -> str:
    environment = {"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret}
    run = CliRunner(env=environment).invoke(cli, ["drain", "--master", cluster.master, *arguments])
    assert run.exit_code == status, run.output
    return run.output


def test_a_drain_says_what_the_disk_keeps_and_gives_it_up_when_told(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=30.0) as client:
        hashes = keys(40, "kept")
        fill(client, hashes)
        disk = segment_of(client, pb.DISK)
        assert disk.chunks > 20
        with pytest.raises(InvalidRequestError, match="--drop-disk"):
            client.drain(disk.segment)
        with pytest.raises(InvalidRequestError, match="no disk"):
            client.drain(segment_of(client, pb.DRAM).segment, drop=True)
        said = drained(cluster, "node-0")
        assert f"disk {disk.segment} of node-0 keeps" in said
        assert "--drop-disk" in said
        drained(cluster, "node-0", "--undo")
        assert client.exists(SPACE, hashes).all()
        there_again(client, hashes[:4])

        facts = json.loads(drained(cluster, "node-0", "--drop-disk", "--json"))["disks"]
        assert [(one["segment"], one["dropped"]) for one in facts] == [(disk.segment, True)]
        # Given up twice is given up, as when the reply was lost.
        assert client.drain(disk.segment, drop=True) == 0
        assert [one for one in client.segments() if one.medium == pb.DISK] == []
        drained(cluster, "node-0", "--undo")
        assert eventually(lambda: on_disk(client) == 0, 30)
        assert set(check(client, hashes)) <= {Outcome.OK, Outcome.MISS}
        # With its node comes an empty one, and it says why.
        cluster.kill_node(0)
        cluster.start_node(0)
        assert eventually(lambda: any(one.medium == pb.DISK for one in client.segments()), 30)
        again = segment_of(client, pb.DISK)
        assert (again.chunks, again.segment != disk.segment) == (0, True)
        assert "the master does not know it" in again.trouble
        fill(client, keys(40, "after"))
        assert eventually(lambda: count(client, "demoted_items") > 40, 30)


def test_the_disk_of_a_node_that_does_not_come_back_can_be_given_up(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=30.0) as client:
        fill(client, keys(40, "kept"))
        disk = segment_of(client, pb.DISK).segment
        cluster.kill_node(0)
        assert eventually(lambda: segment_of(client, pb.DISK).away, 30)
        assert "is given up" in drained(cluster, str(disk), "--drop-disk")
        assert eventually(lambda: client.segments() == [] and not on_disk(client), 30)


def test_a_slab_of_another_size_says_so_at_the_start_and_in_the_status(cluster: LocalCluster) -> None:
    with cluster.client(**CLIENT, timeout=30.0) as client:
        fill(client, keys(40, "kept"))
        cluster.stop_node(0)
        cluster._ssd = "16MiB"
        cluster.start_node(0)
        process = cluster._nodes[0]
        assert process is not None
        assert "it was of 32MiB, and ssd is of 16MiB now" in process.said()
        assert eventually(lambda: any(not one.away and one.medium == pb.DISK for one in client.segments()), 30)
        (there,) = [one for one in client.master_stats()["segments"] if one["capacity_bytes"] == 16 << 20]
        assert "it was of 32MiB" in there["trouble"]
