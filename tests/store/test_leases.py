# SPDX-License-Identifier: Apache-2.0
"""A get that outlives its lease gives nothing, least of all other bytes (case M3)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
from store_testing import content, key, keys

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import Outcome, StoreClient, getting
from moonpool.transfer_engine.testing import Faults, FaultyEngine

LEASE = 0.05
SECONDS = 4.0


def slow_engine(secret: str, seconds: float) -> FaultyEngine:
    return FaultyEngine(
        Faults(delay=1.0, delay_seconds=seconds), listen=None, secret=secret.encode(), connect_timeout=5.0
    )


def test_late_bytes_are_a_miss(shared_cluster: LocalCluster, namespace: str) -> None:
    hash_ = key(namespace)
    with (
        slow_engine(shared_cluster.secret, 0.0) as engine,
        # Otherwise the lease of an earlier get would do.
        shared_cluster.client(engine=engine, locations_max=0) as client,
    ):
        client.put(namespace, [hash_], [content(hash_, 10_000)]).require()
        assert client.get(namespace, [hash_], lease=5.0).ok
        engine.set_faults(Faults(delay=1.0, delay_seconds=4 * LEASE))
        late = client.get(namespace, [hash_], lease=LEASE)
        assert late.outcomes == bytes([Outcome.MISS])
        assert late[0] is None
        assert client.stats()["gets_late"] >= 1
        engine.set_faults(Faults())
        assert client.get(namespace, [hash_], lease=5.0)[0] == content(hash_, 10_000)


@pytest.mark.parametrize("registered", [False, True])
def test_space_is_used_again_under_a_slow_reader(registered: bool) -> None:
    size, many, batch = 16 << 10, 128, 16
    hashes, chance = keys(many), random.Random(5)
    values = [content(hash_, size) for hash_ in hashes]
    with local_cluster(nodes=1, dram="1MiB", master_options={"lease_max": "50ms"}) as cluster:
        writer = cluster.client()
        stop = threading.Event()

        def overwrite() -> None:
            # Half of them fit, so each is evicted soon, and its space is somebody else's.
            round_ = 0
            while not stop.is_set():
                begin = batch * round_ % many
                writer.put("a", hashes[begin : begin + batch], values[begin : begin + batch])
                round_ += 1

        thread = threading.Thread(target=overwrite)
        thread.start()
        try:
            seen: Counter[int] = Counter()
            with slow_engine(cluster.secret, 0.0) as engine, cluster.client(engine=engine, lease=LEASE) as reader:
                engine.set_faults(Faults(seed=3, delay=0.7, delay_seconds=(0.0, 8 * LEASE)))
                room = reader.allocate(8 * size)
                end = time.monotonic() + SECONDS
                while time.monotonic() < end:
                    there = np.flatnonzero(reader.exists("a", hashes)).tolist()
                    if len(there) < 8:
                        continue
                    some = chance.sample(there, 8)
                    wanted = [hashes[index] for index in some]
                    if registered:
                        found = reader.get_into("a", wanted, (room, np.arange(8) * size, size))
                        got = [bytes(memoryview(room).cast("B")[i * size : (i + 1) * size]) for i in range(8)]
                    else:
                        found = reader.get("a", wanted)
                        got = [value or b"" for value in found]
                    seen.update(found.outcomes)
                    for index in found.where(Outcome.OK):
                        assert got[index] == values[some[index]]
            assert seen[Outcome.OK] > 0
            assert seen[Outcome.MISS] > 0
        finally:
            stop.set()
            thread.join()


def test_a_batch_in_pieces_asks_again_before_its_lease_ends(shared_cluster: LocalCluster, namespace: str) -> None:
    # Pieces that take longer than the lease together, and much less each.
    hashes = keys(40, namespace)
    with (
        slow_engine(shared_cluster.secret, 0.0) as engine,
        shared_cluster.client(engine=engine, staging_bytes="1MiB") as client,
    ):
        client.put(namespace, hashes, [content(hash_, 60_000) for hash_ in hashes]).require()
        engine.set_faults(Faults(delay=1.0, delay_seconds=0.3))
        found = client.get(namespace, hashes, lease=1.2)
        assert list(found) == [content(hash_, 60_000) for hash_ in hashes]


def test_a_batch_that_outlives_a_lease_misses_only_what_has_changed(
    shared_cluster: LocalCluster, client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, lease, run = keys(8, namespace), 2.0, getting._Piecewise.run
    values = [content(hash_, 100_000) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    pieces = []

    def changing(piece: getting._Piecewise) -> None:
        pieces.append(piece)
        run(piece)
        if len(pieces) == 1:
            client.remove(namespace, hashes[6:]).require()
            client.put(namespace, hashes[6:7], [b"shorter"]).require()
            time.sleep(lease / 2)

    monkeypatch.setattr(getting._Piecewise, "run", changing)
    # Half of it is room for five.
    with shared_cluster.client(staging_bytes="1MiB", locations_max=0) as slow:
        found = slow.get(namespace, hashes, lease=lease)
    assert len(pieces) == 2
    assert found.outcomes == bytes([Outcome.OK] * 6 + [Outcome.MISS] * 2)
    assert list(found) == [*values[:6], None, None]
