# SPDX-License-Identifier: Apache-2.0
"""Copies that are spoilt, with nodes that look at their own memory: what is good stays, and what is not is replaced."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from engine_testing.leaks import eventually
from store_testing import content, keys, locate, spoil, unheard

from moonpool.cli import cli
from moonpool.cluster import LocalCluster, local_cluster
from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import Outcome, StoreClient
from moonpool.store_client.getting import _Piecewise

SPACE = "mending"
SIZE = 5000
# Drains wait for leases; nobody here is to be lost or quarantined by chance.
OPTIONS: dict[str, Any] = {"lease_max": "200ms", "session_timeout": "60s"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=3, dram="16MiB", master_options=OPTIONS) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[StoreClient]:
    with cluster.client(lease=0.1) as made:
        yield made
        for segment in made.segments():
            if segment.state == pb.DRAINING:
                made.drain(segment.segment, undo=True)


def filled(client: StoreClient, namespace: str, count: int = 6, **more: Any) -> list[bytes]:
    hashes = keys(count, namespace)
    client.put(namespace, hashes, [content(one, SIZE) for one in hashes], **more).require()
    return hashes


def counts(client: StoreClient) -> tuple[int, int, int]:
    """Copies that nodes have found spoilt, that were replaced, and chunks that were lost with them."""
    told = client.master_stats()["counts"]
    return told["spoilt_items"], told["spoilt_replaced_items"], told["spoilt_lost_items"]


def good(client: StoreClient, namespace: str, hashes: list[bytes], extents: Any) -> bool:
    """Whether each chunk has two copies, none of them where it was spoilt, and all good."""
    now = locate(client, namespace, hashes)
    if now.shape != (len(hashes), 2):
        return False
    # Another chunk may be there by now.
    if (now[["segment", "offset"]] == extents[["segment", "offset"]][:, np.newaxis]).any():
        return False
    for hash_, row in zip(hashes, now, strict=True):
        assert all(payload(client, extent) == content(hash_, SIZE) for extent in row)
    return True


def payload(client: StoreClient, extent: Any) -> bytes:
    target = client._core.segments.target(int(extent["segment"]), client._core.link.cluster, time.monotonic() + 10)
    region = client.engine.allocate(SIZE)
    try:
        client.engine.read(target.peer, region, target.region, 0, int(extent["offset"]) + 64, SIZE).wait()
        return bytes(region)
    finally:
        region.release()


def run_cli(cluster: LocalCluster, *arguments: str) -> Result:
    env = {"MOONPOOL_STORE_CLIENT_SECRET": cluster.secret, "MOONPOOL_STORE_CLIENT_MASTER": cluster.master}
    return CliRunner(env=env).invoke(cli, arguments)


def test_a_drain_takes_the_bytes_of_a_good_copy(cluster: LocalCluster, client: StoreClient, namespace: str) -> None:
    before = counts(client)
    hashes = filled(client, namespace, replicas=2)
    extents = locate(client, namespace, hashes)[:, 0]
    number = int(extents[0]["segment"])
    some = [row for row in range(6) if extents[row]["segment"] == number]
    for row in some:
        spoil(client, extents[row], 64 + row)
    drained = run_cli(cluster, "drain", "--segment", str(number), "--wait")
    assert drained.exit_code == 0, drained.output
    assert good(client, namespace, [hashes[row] for row in some], extents[some])
    assert np.subtract(counts(client), before).tolist() == [len(some), len(some), 0]


def test_a_move_takes_the_bytes_of_a_good_copy(client: StoreClient, namespace: str) -> None:
    hashes = filled(client, namespace, replicas=2)
    extents = locate(client, namespace, hashes)
    for row in range(6):
        spoil(client, extents[row, 0], 64)
        target = ({segment.segment for segment in client.segments()} - set(extents[row]["segment"].tolist())).pop()
        client.move(namespace, [hashes[row]], segment=target).require()
        assert target in locate(client, namespace, [hashes[row]])["segment"]
    assert eventually(lambda: good(client, namespace, hashes, extents[:, 0]), 30)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_chunk_without_a_good_copy_is_no_burden(
    cluster: LocalCluster, client: StoreClient, namespace: str, replicas: int
) -> None:
    before = counts(client)
    hash_, other = filled(client, namespace, 2, replicas=replicas)
    for extent in locate(client, namespace, [hash_])[0]:
        spoil(client, extent, 64)
    number = int(locate(client, namespace, [hash_])[0, 0]["segment"])
    drained = run_cli(cluster, "drain", "--segment", str(number), "--wait")
    assert drained.exit_code == 0, drained.output
    assert client.exists(namespace, [hash_, other]).tolist() == [False, True]
    found, _, lost = np.subtract(counts(client), before).tolist()
    assert (found, lost) == (replicas, 1)
    client.put(namespace, [hash_], [content(hash_, SIZE)]).require()
    assert client.get(namespace, [hash_])[0] == content(hash_, SIZE)


def test_what_a_reader_has_found_is_mended(client: StoreClient, namespace: str) -> None:
    hashes = filled(client, namespace, replicas=2)
    extents = locate(client, namespace, hashes)[:, 0]
    for extent in extents:
        spoil(client, extent, 64)

    def mended() -> bool:
        for one in [*hashes, hashes[0]]:  # copies take turns
            assert client.get(namespace, [one], lease=5.0)[0] == content(one, SIZE)
        return good(client, namespace, hashes, extents)

    assert eventually(mended, 30)
    assert {segment.state for segment in client.segments()} == {pb.ACTIVE}


def test_a_reader_remembers_which_copy_is_spoilt(
    client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = filled(client, namespace, replicas=2)
    unheard(client, monkeypatch)
    for extent in locate(client, namespace, hashes)[:, 0]:
        spoil(client, extent, 64)
    for one in hashes * 11:  # copies take turns
        assert client.get(namespace, [one, hashes[0]], lease=5.0)[0] == content(one, SIZE)
        client.get(namespace, [hashes[0]])
    assert 0 < client.stats()["corrupt_found"] <= 6
    client.remove(namespace, hashes)


def test_a_reader_with_a_bad_network_costs_no_copy(
    client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, before = filled(client, namespace, 20, replicas=2), counts(client)
    extents = locate(client, namespace, hashes)
    with monkeypatch.context() as patch:
        nothing = np.zeros(20, dtype=np.bool_)
        patch.setattr(_Piecewise, "_verified", lambda _, place, rows, wanted, moved: nothing[: len(rows)])
        assert client.get(namespace, hashes, lease=5.0).count(Outcome.CORRUPT) == 20
        # What its nodes do not find counts as a failure of the segments.
        assert eventually(lambda: client.master_stats()["counts"]["probes"], 30)
    assert counts(client) == before
    assert (locate(client, namespace, hashes) == extents).all()
    assert list(client.get(namespace, hashes)) == [content(one, SIZE) for one in hashes]


def test_a_pool_of_two_nodes_replaces_a_copy_where_it_was() -> None:
    with local_cluster(nodes=2, dram="16MiB", master_options=OPTIONS) as cluster, cluster.client(lease=0.1) as client:
        hashes = filled(client, SPACE, replicas=2)
        extents = locate(client, SPACE, hashes)[:, 0]
        for extent in extents:
            spoil(client, extent, 64)

        def mended() -> bool:
            # A reader names a copy once a minute, and what it says may be lost on a busy machine.
            with cluster.client(lease=0.1) as reader:
                for one in [*hashes, hashes[0], *hashes]:  # copies take turns
                    reader.get(SPACE, [one], lease=5.0).require()
            return good(client, SPACE, hashes, extents)

        assert eventually(mended, 60)


def test_a_drain_says_at_once_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store_client.commands.drain._PATIENCE_WITH_OTHERS", 0.5)
    options = {**OPTIONS, "heartbeat_interval": "200ms"}
    with local_cluster(nodes=2, dram="16MiB", master_options=options) as cluster, cluster.client() as client:
        client.put(SPACE, keys(20, SPACE), [b"x" * 100] * 20).require()
        number = next(one.segment for one in client.segments() if one.node == "node-0")
        cluster.signal_node(0, signal.SIGSTOP)
        client._core.report(number, client._core.link.cluster, MoonpoolError("a test says so"))
        assert eventually(lambda: any(one.state == pb.QUARANTINED for one in client.segments()), 30)
        told = run_cli(cluster, "drain", "node-0", "--wait", "--json")
        cluster.signal_node(0, signal.SIGCONT)
        first = told.stderr.splitlines()[0]
        assert first.startswith(f"segment {number} of node-0 waits: quarantined ")
        assert "a test says so" in first
        assert "Try: " in first
        assert '"trouble": "quarantined ' in told.stdout
        assert told.exit_code == 1
