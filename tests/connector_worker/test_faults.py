# SPDX-License-Identifier: Apache-2.0
"""When parts of the pool die, stop or lie: every job of a worker ends in its time, and never with wrong bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from store_testing import keys
from worker_testing.faults import breaks, held_in, spoil
from worker_testing.rig import CHUNK_BLOCKS, Rig

from moonpool.cluster import LocalCluster, environment_without_settings, local_cluster

Rigs = Callable[..., Rig]
TIMEOUT = 2.0
#: How much later than that a job may end on a machine that does other things too.
SLACK = 12.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One that a test may break."""
    with local_cluster(nodes=1, dram="64MiB") as cluster:
        yield cluster


@pytest.mark.parametrize("what", ["kill master", "stop master", "kill node", "stop node"])
def test_a_load_that_the_pool_leaves_alone_ends_in_its_time(
    rigs: Rigs, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", "tcp")  # memory of a node that was stopped can be read otherwise
    rig = rigs(cluster)
    hashes = rig.put(9)
    chunks = [rig.cache.chunk([block, block + 1]) for block in range(0, 18, 2)]
    rig.cache.fill(77)
    came, go_on = held_in(monkeypatch, "get_into")
    load = rig.load(hashes, range(30, 48), timeout=TIMEOUT)
    other = rig.load(hashes[:3], range(50, 56), timeout=TIMEOUT)
    assert came.wait(30)
    breaks(cluster, what)
    go_on.set()
    rig.loaded(2, seconds=TIMEOUT + SLACK)
    for one, blocks in ((load, range(30, 48)), (other, range(50, 56))):
        assert one.failed_blocks == list(blocks)[one.good * CHUNK_BLOCKS :]
        for number in range(one.good):
            assert rig.cache.chunk([blocks[2 * number], blocks[2 * number + 1]]) == chunks[number]
    assert load.good < 9
    assert len(rig.loads) == 0


@pytest.mark.parametrize("what", ["kill master", "stop master", "kill node", "stop node"])
def test_a_save_that_the_pool_leaves_alone_ends_in_its_time(
    rigs: Rigs, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", "tcp")
    rig = rigs(cluster, timeout=TIMEOUT)
    rig.put(1)
    came, go_on = held_in(monkeypatch, "put")
    rig.save(keys(9, "more"), range(18))
    rig.save(keys(9, "waits"), range(18))
    assert came.wait(30)
    breaks(cluster, what)
    go_on.set()
    ended = rig.saved(2, seconds=TIMEOUT + SLACK)
    assert not any(save.saved for save in ended.values())
    assert len(rig.saves) == 0


def test_a_pool_that_is_away_is_a_miss_at_once_and_used_again_when_it_is_back(
    rigs: Rigs, cluster: LocalCluster
) -> None:
    rig = rigs(cluster, timeout=30.0, retry=5.0)
    hashes = rig.put(3)
    rig.cache.storage[:] = 0
    cluster.kill_master()
    load = rig.load(hashes, range(30, 36), timeout=1.0)
    rig.loaded(seconds=1.0 + SLACK)
    assert load.good == 0
    while rig.link.client is not None:  # the thread that has asked learns of it last
        time.sleep(0.01)
    # Nobody else is made to wait for it.
    late = rig.load(hashes, range(30, 36), timeout=60.0)
    rig.save(keys(1, "away"), [0, 1])
    assert not rig.saved(seconds=5.0).popitem()[1].saved
    rig.loaded(seconds=5.0)
    assert late.good == 0
    counted = rig.counted()
    assert counted["loads_away"] == counted["saves_away"] == 1
    cluster.start_master()
    deadline = time.monotonic() + 60
    while True:
        load = rig.load(hashes, range(30, 36), timeout=5.0)
        rig.loaded()
        rig.save(hashes, range(30, 36))
        if rig.saved().popitem()[1].saved:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_chunk_that_was_spoilt_is_a_miss(rigs: Rigs, cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(cluster)
    hashes = rig.put(4)
    client = rig.link.client
    assert client is not None
    spoil(client, rig, hashes[2])
    load = rig.load(hashes, range(30, 38))
    rig.loaded()
    assert load.good == 2
    assert load.failed_blocks == [34, 35, 36, 37]
    assert rig.cache.chunk([30, 31, 32, 33]) == rig.cache.chunk([0, 1, 2, 3])
    assert rig.counted()["load_chunks_corrupt"] == 1
    assert "CHUNK_CORRUPT" in caplog.text


def test_what_runs_ends_when_the_worker_is_shut_down(
    rigs: Rigs, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(cluster)
    hashes = rig.put(9)
    cluster.signal_node(0, signal.SIGSTOP)
    loads = [rig.load(hashes, range(30, 48), timeout=60.0) for _ in range(4)]
    rig.save(keys(9, "more"), range(18))
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < SLACK
    assert {load.job.request_id for load in loads} == {load.job.request_id for load in rig.loads.ended()}
    assert len(rig.saves.ended()) == 1
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("moonpool-load", "moonpool-save", "moonpool-pool"))}


def test_a_client_that_was_closed_ends_jobs_and_no_thread(rigs: Rigs) -> None:
    rig = rigs()
    hashes = rig.put(2)
    client = rig.link.client
    assert client is not None
    client.close()
    load = rig.load(hashes, range(10, 14))
    rig.save(keys(1, "closed"), [0, 1])
    rig.loaded(seconds=SLACK)
    assert load.good == 0
    assert not rig.saved(seconds=SLACK).popitem()[1].saved


PROGRAM = """
import sys
from moonpool.cluster import LocalCluster, local_cluster
from worker_testing.rig import Rig

with local_cluster(nodes=1, dram="32MiB") as cluster:
    rig = Rig(cluster, "exit")
    hashes = rig.put(3)
    rig.load(hashes, range(6))
    print("left", flush=True)
    sys.exit(0)
"""


def test_an_interpreter_ends_with_loads_under_way() -> None:
    environment = environment_without_settings()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"left\n"
