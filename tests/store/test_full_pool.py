# SPDX-License-Identifier: Apache-2.0
"""A put that is larger than what there is room for: what it says is there is there, and a chain has its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from store_testing import keys

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import NoSpaceError, Outcome, Results, StoreClient
from moonpool.store_client.packing import NO_RANGES, ROOT, ranges_with

KIB = 1 << 10
#: Fits so often into the pool.
SIZE, FIT = 60 * KIB, 17


@pytest.fixture(scope="module", params=["prefix", "lru", "s3fifo"])
def pool(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    # Whatever is evicted is evicted for a put.
    options = {"policy": request.param, "lease_max": "50ms", "high_watermark": "1", "low_watermark": "1"}
    with local_cluster(nodes=1, dram="1MiB", master_options=options) as cluster:
        yield cluster


@pytest.fixture
def client(pool: LocalCluster) -> Iterator[StoreClient]:
    with pool.client(space_wait=0.1, batch_chunks=5) as client:
        yield client


def fits(client: StoreClient, namespace: str, hashes: list[bytes], results: Results, before: int = 0) -> int:
    """See that what was put is there, from the first on, and return how many that are."""
    there = client.exists(namespace, hashes).tolist()
    assert there == [outcome in (Outcome.OK, Outcome.ALREADY) for outcome in results.outcomes]
    count = sum(there)
    assert results.outcomes == bytes(
        [Outcome.ALREADY] * before + [Outcome.OK] * (count - before) + [Outcome.FAILED] * (len(hashes) - count)
    )
    assert all(isinstance(error, NoSpaceError) and error.retry_after > 0 for error in results.errors.values())
    assert client.match_prefix(namespace, hashes) == count
    return count


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("batch_chunks", [5, 100])
def test_a_put_evicts_nothing_that_it_has_put(
    pool: LocalCluster, namespace: str, chained: bool, batch_chunks: int
) -> None:
    with pool.client(space_wait=0.1, batch_chunks=batch_chunks) as client:
        old, new = keys(FIT, namespace, "old"), keys(3 * FIT, namespace)
        client.put(namespace, old, [b"o" * SIZE] * FIT).require()
        with client.pin(namespace, old[: FIT // 2]):
            put = client.put(namespace, new, [b"n" * SIZE] * len(new), parents=ROOT if chained else None)
            assert fits(client, namespace, new, put) == FIT - FIT // 2
        # The next one may have it all.
        client.put(namespace, old, [b"o" * SIZE] * FIT).require()
        assert client.exists(namespace, old).all()


def test_a_put_evicts_nothing_that_it_found(client: StoreClient, namespace: str) -> None:
    hashes = keys(2 * FIT, namespace)
    client.put(namespace, hashes[: FIT - 3], [b"o" * SIZE] * (FIT - 3)).require()
    put = client.put(namespace, hashes, [b"o" * SIZE] * len(hashes))
    assert fits(client, namespace, hashes, put, before=FIT - 3) == FIT


def test_a_put_evicts_nothing_that_it_hangs_on(client: StoreClient, namespace: str) -> None:
    chain, other = keys(FIT, namespace), keys(FIT - 1, namespace, "other")
    client.put(namespace, other, [b"o" * SIZE] * len(other)).require()
    with client.pin(namespace, other):
        client.put(namespace, chain[:1], [b"p" * SIZE], parents=ROOT).require()
        assert not client.put(namespace, chain[1:], [b"n" * SIZE] * (FIT - 1), parents=chain[0]).ok
        assert not client.put(namespace, chain[1:2], [b"n" * SIZE], parents=[chain[0]]).ok
        assert client.match_prefix(namespace, chain) == 1
    client.put(namespace, chain[1:], [b"n" * SIZE] * (FIT - 1), parents=chain[0]).require()
    assert client.match_prefix(namespace, chain) == FIT


def test_nothing_is_put_behind_what_found_no_room(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What comes after it is small, and would fit.
    with local_cluster(nodes=1, dram="1MiB") as cluster, cluster.client(space_wait=0.1, batch_chunks=5) as client:
        old, chain = keys(FIT, namespace, "old"), keys(20, namespace)
        client.put(namespace, old, [b"o" * SIZE] * FIT).require()
        values = [b"n" * 512] * 4 + [b"n" * SIZE] + [b"n" * 512] * 15
        with client.pin(namespace, old):
            put = client.put(namespace, chain, values, parents=ROOT)
            assert fits(client, namespace, chain, put) == 4
            client.remove(namespace, chain[:1])
            hashes, call, waits = keys(20, namespace, "alone"), client._core.call, []

            def noting(method: str, request: Any, deadline: float) -> Any:
                if method == "PutStart" and hashes[4] not in request.hashes:
                    waits.append(request.wait_ms)
                return call(method, request, deadline)

            monkeypatch.setattr(client._core, "call", noting)
            alone = client.put(namespace, hashes, values)
            assert alone.count(Outcome.OK) == 5
            assert alone.outcomes[4] == Outcome.FAILED
            # One wait is enough to know.
            assert waits == [0, 0, 0]


def test_what_is_being_put_is_not_evicted_by_the_master_itself(namespace: str) -> None:
    with local_cluster(nodes=1, dram="1MiB") as cluster, cluster.client(space_wait=1.0) as client:
        chain = keys(200, namespace)
        put = client.put(namespace, chain, [b"n" * 8 * KIB] * 200, parents=ROOT)
        # Above the high watermark.
        assert fits(client, namespace, chain, put) > 0.96 * 128


def test_ranges_of_generations() -> None:
    def made(*batches: list[int]) -> list[list[int]]:
        ranges = NO_RANGES
        for batch in batches:
            ranges = ranges_with(ranges, np.array(batch, dtype="<u8"))
        found: list[list[int]] = ranges.tolist()
        return found

    large = 2**64 - 1
    assert made([]) == []
    assert made([7]) == [[7, 7]]
    assert made([3, 1, 2], [], [9, 5]) == [[1, 3], [5, 5], [9, 9]]
    assert made([1, 2, 3], [2], [4]) == [[1, 4]]
    assert made([1, 5], [2, 3, 4], [0, large]) == [[0, 5], [large, large]]
    # More than a message has room for: none is left out.
    scattered = np.random.default_rng(1).integers(0, 2**63, 10_000, dtype="<u8")
    ranges = ranges_with(ranges_with(NO_RANGES, scattered[:5000]), scattered[5000:])
    assert len(ranges) == 4096
    assert (ranges[1:, 0] > ranges[:-1, 1]).all()
    where = np.searchsorted(ranges[:, 0], scattered, side="right") - 1
    assert (scattered <= ranges[where, 1]).all()
