# SPDX-License-Identifier: Apache-2.0
"""A random workload while nodes, clients and the master are killed: every get is a miss, a typed error or the bytes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
from store_testing import content, key, say

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.errors import MoonpoolError
from moonpool.store_client import Outcome, StoreClient

SECONDS = 20.0
KEYS = 400
# A put may find the master away and its node dead one after the other.
TIMEOUT = 60.0
OPTIONS = {
    "session_timeout": "2s",
    "heartbeat_interval": "200ms",
    "put_begin": "1s",
    "put_deadline": "5s",
    "lease_max": "1s",
    "segment_grace": "3s",
    "quarantine": "1s",
}


def length(number: int) -> int:
    return 1 + (number * number * 977) % 60_000


class Worker(threading.Thread):
    """Puts, gets and removes, through one client after the other."""

    def __init__(self, cluster: LocalCluster, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"worker-{seed}")
        self._cluster = cluster
        self._random = random.Random(seed)
        self._over = stop
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                # Some say goodbye, some are dropped: the master has to find out.
                with self._cluster.client(
                    timeout=TIMEOUT, startup_timeout=TIMEOUT, staging_bytes="4MiB", lease=0.5
                ) as client:
                    for _ in range(self._random.randrange(20, 200)):
                        if self._over.is_set():
                            break
                        self._step(client)
        except BaseException as failure:  # noqa: BLE001 - told by the main thread
            self.failure = failure

    def _step(self, client: StoreClient) -> None:
        numbers = self._random.sample(range(KEYS), self._random.randrange(1, 12))
        hashes = [key(number) for number in numbers]
        what = self._random.choices(["put", "get", "into", "range", "remove", "exists"], [6, 6, 3, 2, 1, 1])[0]
        try:
            if what == "put":
                values = [content(hash_, length(number)) for hash_, number in zip(hashes, numbers, strict=True)]
                results = client.put("a", hashes, values, replicas=self._random.choice((1, 1, 2)))
                self.seen.update(f"put {Outcome(outcome).name}" for outcome in results.outcomes)
                self.seen.update(f"put {type(error).__name__}" for error in results.errors.values())
            elif what == "remove":
                client.remove("a", hashes[:2])
            elif what == "exists":
                client.exists("a", hashes)
            else:
                self._get(client, what, numbers, hashes)
        except MoonpoolError as error:
            self.seen[f"{what} raised {type(error).__name__}"] += 1

    def _get(self, client: StoreClient, what: str, numbers: list[int], hashes: list[bytes]) -> None:
        wanted = [content(hash_, length(number)) for hash_, number in zip(hashes, numbers, strict=True)]
        if what == "range":
            results = client.get("a", hashes, ranges=(0, 1))
            values, wanted = list(results), [value[:1] for value in wanted]
        elif what == "into":
            room = [bytearray(60_000) for _ in hashes]
            results = client.get_into("a", hashes, room)
            values = [bytes(one[:n]) for one, n in zip(room, results.lengths, strict=True)]
        else:
            results = client.get("a", hashes)
            values = list(results)
        self.seen.update(f"get {Outcome(outcome).name}" for outcome in results.outcomes)
        self.seen.update(f"get {type(error).__name__}" for error in results.errors.values())
        for index in results.where(Outcome.OK):
            if values[index] != wanted[index]:
                self.wrong.append(f"{what} of {numbers[index]}: {values[index][:32]!r} != {wanted[index][:32]!r}")


def _kill_things(cluster: LocalCluster, chance: random.Random, end: float) -> Counter[str]:
    done: Counter[str] = Counter()
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.3, 1.2))
        what = chance.choice(["node", "node", "master", "stop node"])
        done[what] += 1
        if what == "master":
            cluster.restart_master()
            continue
        index = chance.randrange(3)
        if what == "node":
            cluster.kill_node(index)
        else:
            cluster.stop_node(index)
        time.sleep(chance.uniform(0.0, 0.5))
        cluster.start_node(index)
    return done


@pytest.mark.parametrize("seed", [1])
def test_every_get_is_a_miss_an_error_or_the_bytes(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    with local_cluster(nodes=3, dram="4MiB", store="sqlite", master_options=OPTIONS) as cluster:
        workers = [Worker(cluster, 100 * seed + number, stop) for number in range(4)]
        for worker in workers:
            worker.start()
        try:
            killed = _kill_things(cluster, random.Random(seed), time.monotonic() + SECONDS)
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        seen = sum((worker.seen for worker in workers), Counter())
        say(capsys, f"killed {dict(killed)}; {dict(sorted(seen.items()))}")
        assert not [worker.failure for worker in workers if worker.failure is not None]
        assert not [wrong for worker in workers for wrong in worker.wrong]
        assert seen["get OK"] > 100
        assert seen["put OK"] > 100
        # And when the dust has settled it works as ever.
        with cluster.client(timeout=TIMEOUT) as client:
            fresh = [key("fresh", number) for number in range(20)]
            client.put("a", fresh, [content(hash_, 1000) for hash_ in fresh]).require()
            assert np.all(client.exists("a", fresh))
            assert list(client.get("a", fresh)) == [content(hash_, 1000) for hash_ in fresh]
