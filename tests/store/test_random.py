# SPDX-License-Identifier: Apache-2.0
"""Random calls while nodes, clients and the master are killed and paused: each get is a miss, an error or the bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from engine_testing.leaks import eventually
from store_testing import content, key, say
from store_testing.workload import TIMEOUT, Workload

from moonpool.cluster import LocalCluster, local_cluster

SECONDS = 10.0
NODES = 3
ACTIONS = ["kill node", "kill client", "kill master", "stop node", "pause client", "pause node"]
SEEDS = [int(seed) for seed in os.environ.get("POOL_SEEDS", "1,2").split(",")]
OPTIONS = {
    "session_timeout": "2s",
    "heartbeat_interval": "200ms",
    "put_begin": "1s",
    "put_deadline": "5s",
    "lease_max": "1s",
    "segment_grace": "3s",
    "quarantine": "1s",
}
#: With disks below the memory, which what is used again is pressed down to.
DISKS = {"high_watermark": "0.6", "low_watermark": "0.4"}


class Killed:
    """A client in a process of its own, which is killed and replaced by another now and then."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._count = 0
        self._start()

    def _start(self) -> None:
        self._count += 1
        path = self._folder / f"{self._count}.json"
        arguments = [self._cluster.master, self._cluster.secret, str(self._count), str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen([sys.executable, "-m", "store_testing.workload", *arguments], env=environment)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def again(self) -> None:
        self.end()
        self._start()

    def found(self) -> tuple[Counter[str], list[str]]:
        seen: Counter[str] = Counter()
        wrong = []
        for path in self._folder.glob("*.json"):
            # One that was killed while it wrote has told before.
            with contextlib.suppress(json.JSONDecodeError):
                its, its_wrong = json.loads(path.read_text(encoding="utf-8"))
                seen.update(its)
                wrong += its_wrong
        return seen, wrong


def kill_things(cluster: LocalCluster, client: Killed, chance: random.Random) -> Counter[str]:
    done: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        # Each once in every round, in another order.
        for what in chance.sample(ACTIONS, len(ACTIONS)):
            time.sleep(chance.uniform(0.2, 0.8))
            done[what] += 1
            if what == "kill client":
                client.again()
            elif what == "pause client":
                # Longer than its session: what it was writing is fenced and given to others before it goes on.
                client.signal(signal.SIGSTOP)
                time.sleep(chance.uniform(2.2, 3.0))
                client.signal(signal.SIGCONT)
            elif what == "pause node":
                index = chance.randrange(NODES)
                cluster.signal_node(index, signal.SIGSTOP)
                time.sleep(chance.uniform(0.5, 3.0))
                cluster.signal_node(index, signal.SIGCONT)
            elif what == "kill master":
                cluster.kill_master()
                time.sleep(chance.uniform(0.0, 0.3))
                cluster.start_master()
            else:
                index = chance.randrange(NODES)
                (cluster.kill_node if what == "kill node" else cluster.stop_node)(index)
                time.sleep(chance.uniform(0.0, 0.5))
                cluster.start_node(index)
    return done


@pytest.mark.parametrize("seed", SEEDS)
def test_every_get_is_a_miss_an_error_or_the_bytes(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shared memory is written by the client itself, TCP by the node.
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", ("auto", "tcp")[seed % 2 == 0])
    over = threading.Event()
    ssd, options = (None, OPTIONS) if seed % 2 == 0 else ("8MiB", {**OPTIONS, **DISKS})
    with local_cluster(nodes=NODES, dram="4MiB", store="sqlite", ssd=ssd, master_options=options) as cluster:
        works = [Workload(cluster.master, cluster.secret, 100 * seed + number) for number in range(3)]
        failures: list[BaseException] = []

        def run(work: Workload) -> None:
            try:
                work.run(over)
            except BaseException as failure:  # noqa: BLE001 - told by the main thread
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        client = Killed(cluster, tmp_path)
        for thread in threads:
            thread.start()
        try:
            killed = kill_things(cluster, client, random.Random(seed))
        finally:
            over.set()
            for thread in threads:
                thread.join()
            client.end()
        seen, wrong = client.found()
        for work in works:
            seen += work.seen
            wrong += work.wrong
        say(capsys, f"seed {seed}: {dict(killed)}; {dict(sorted(seen.items()))}")
        assert not wrong
        assert not failures
        assert not seen["open raised MasterUnavailableError"]
        assert seen["get OK"] > 100
        assert seen["put OK"] > 100
        # And when the dust has settled it works as ever.
        with cluster.client(timeout=TIMEOUT) as checker:
            # Nothing is under way any more, for ever.
            assert eventually(lambda: not checker.master_stats()["index"]["moving"], TIMEOUT)
            fresh = [key("fresh", number) for number in range(20)]
            checker.put("a", fresh, [content(hash_, 1000) for hash_ in fresh]).require()
            assert list(checker.get("a", fresh)) == [content(hash_, 1000) for hash_ in fresh]
