# SPDX-License-Identifier: Apache-2.0
"""Loads and saves of workers that share a pool in which nothing breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from store_testing import keys
from worker_testing import Cache
from worker_testing.rig import CHUNK_BLOCKS, Rig

from moonpool.cluster import LocalCluster
from moonpool.connector.moving import make_areas
from moonpool.errors import ConfigError
from moonpool.store_client import StoreClient

Rigs = Callable[..., Rig]
STRAIGHT = pytest.mark.parametrize("rigs", [True], ids=["straight"], indirect=True)
STAGED = pytest.mark.parametrize("rigs", [False], ids=["staged"], indirect=True)


def chunk(rig: Rig, number: int) -> bytes:
    """The bytes of the chunk in the `number`-th pair of blocks."""
    return rig.cache.chunk(list(range(number * CHUNK_BLOCKS, (number + 1) * CHUNK_BLOCKS)))


def test_what_one_worker_saves_another_one_loads(rigs: Rigs) -> None:
    writer, reader = rigs(), rigs(cache=Cache("BLHNC", blocks=64, heads=2, tokens=16, content=64))
    hashes = writer.put(10)  # in four parts
    blocks = list(range(63, 43, -1))
    load = reader.load(hashes, blocks)
    assert reader.loaded() == {load.job.request_id: load}
    assert load.good == 10
    assert load.failed_blocks == []
    for number in range(10):
        assert reader.cache.chunk(blocks[2 * number : 2 * number + 2]) == chunk(writer, number)
    counted = reader.counted()
    assert counted["loads_ok"] == 1
    assert counted["load_chunks"] == 10
    assert counted[f"load_{reader.way}_bytes"] == 10 * reader.paged.chunk_bytes
    assert writer.counted() == {
        "saves_ok": 1, "save_chunks": 10, f"save_{writer.way}_bytes": 10 * writer.paged.chunk_bytes
    }  # fmt: skip
    assert not reader.loads.ended()


def test_blocks_that_the_cache_has_are_left_alone(rigs: Rigs) -> None:
    writer, reader = rigs(), rigs()
    hashes = writer.put(3)
    reader.cache.fill(99)
    before = reader.cache.storage.copy()
    # The second block of the first chunk, the second chunk, the first block of the third one.
    load = reader.load(hashes, [40, 41, 42, 43], begin_block=1)
    reader.loaded()
    assert load.good == 3
    assert reader.cache.chunk([40, 41, 42, 43]) == writer.cache.chunk([1, 2, 3, 4])
    for layer in range(reader.cache.layers):
        reader.cache.array(layer)[40:44] = 0
    now = reader.cache.storage.copy()
    reader.cache.storage[:] = before
    for layer in range(reader.cache.layers):
        reader.cache.array(layer)[40:44] = 0
    assert (reader.cache.storage == now).all()


@pytest.mark.parametrize("missing", [0, 1, 4, 9])
def test_a_load_ends_at_the_first_chunk_that_is_not_there(rigs: Rigs, missing: int) -> None:
    rig = rigs()
    hashes = rig.put(10)
    client = rig.link.client
    assert client is not None
    client.remove(rig.saves._pool.namespace, [hashes[missing]]).require()
    rig.cache.fill(7)
    load = rig.load(hashes, range(30, 49), begin_block=1)
    rig.loaded()
    assert load.good == missing
    assert load.failed_blocks == list(range(30 + max(0, 2 * missing - 1), 49))
    counted = rig.counted()
    assert counted["loads_missing"] == counted["load_chunks_missed"] == 1
    assert counted["loads_partial"] == (1 if missing else 0)


def test_chunks_of_another_length_are_not_loaded(rigs: Rigs) -> None:
    short, long = rigs(cache=Cache(blocks=64)), rigs()
    hashes = short.put(2)
    load = long.load(hashes, range(4))
    long.loaded()
    assert load.good == 0
    assert long.counted()["load_chunks_failed"] == 1
    hashes = long.put(2, "long")
    load = short.load(hashes, range(4))
    short.loaded()
    assert load.good == 0


def test_what_is_in_the_pool_is_not_moved_again(rigs: Rigs) -> None:
    rig = rigs()
    hashes = rig.put(4)
    rig.counted()
    rig.save(hashes, range(8))
    assert rig.saved().popitem()[1].saved
    assert rig.counted() == {"saves_already": 1}
    more = hashes + keys(2, "more")
    rig.save(more, range(12))
    rig.saved()
    assert rig.counted() == {"saves_ok": 1, "save_chunks": 2, f"save_{rig.way}_bytes": 2 * rig.paged.chunk_bytes}
    assert rig.link.client is not None
    assert rig.link.client.match_prefix(rig.saves._pool.namespace, more) == 6


def test_a_chunk_is_there_when_every_worker_has_saved_its_shard(rigs: Rigs) -> None:
    first, second = rigs(shard=0, shards=2), rigs(shard=1, shards=2)
    hashes = first.put(5)
    load = first.load(hashes, range(20, 30))
    first.loaded()
    assert load.good == 0
    second.cache.fill(8)
    second.save(hashes, range(10))
    second.saved()
    for rig in (first, second):
        load = rig.load(hashes, range(20, 30))
        rig.loaded()
        assert load.good == 5
        for number in range(5):
            assert rig.cache.chunk([20 + 2 * number, 21 + 2 * number]) == chunk(rig, number)


def test_many_loads_and_saves_at_the_same_time(rigs: Rigs) -> None:
    writer, reader = rigs(save_threads=3, waiting_max=64), rigs(load_threads=4)
    writer.cache.fill(5)
    hashes = keys(32, "many")
    for number in range(32):
        writer.save([hashes[number]], [2 * number, 2 * number + 1])
    assert all(save.saved for save in writer.saved(32).values())
    loads = [reader.load([hashes[number]], [63 - 2 * number, 62 - 2 * number]) for number in range(32)]
    assert len(reader.loads) == 32
    reader.loaded(32)
    assert all(load.good == 1 for load in loads)
    assert not reader.loads
    for number in range(32):
        assert reader.cache.chunk([63 - 2 * number, 62 - 2 * number]) == chunk(writer, number)


def test_saves_that_are_too_many_are_dropped_and_counted(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(waiting_max=2)
    held = threading.Event()
    began = threading.Semaphore(0)
    exists = StoreClient.exists

    def slowly(*args: object, **kwargs: object) -> object:
        began.release()
        assert held.wait(30)
        return exists(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreClient, "exists", slowly)
    jobs = [rig.save(keys(1, "first"), [0, 1])]
    assert began.acquire(timeout=30)
    jobs += [rig.save(keys(1, number), [0, 1]) for number in range(5)]
    dropped = rig.saved(3)
    assert sorted(dropped) == jobs[3:]
    assert not any(save.saved for save in dropped.values())
    # A load does not wait for them.
    load = rig.load(keys(1, "nothing"), [2, 3])
    rig.loaded()
    assert load.good == 0
    held.set()
    assert all(save.saved for save in rig.saved(3).values())
    assert rig.counted()["saves_dropped"] == 3


@STAGED
def test_a_cancelled_load_ends_at_once_and_its_blocks_stay_as_they_are(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(load_threads=1)
    hashes = rig.put(6)
    held, came = threading.Event(), threading.Event()
    get_into = StoreClient.get_into

    def slowly(*args: object, **kwargs: object) -> object:
        got = get_into(*args, **kwargs)  # type: ignore[arg-type]
        came.set()
        assert held.wait(30)
        return got

    monkeypatch.setattr(StoreClient, "get_into", slowly)
    running = rig.load(hashes, range(20, 32), request_id="running")
    waiting = rig.load(hashes, range(32, 44), request_id="waiting")
    assert came.wait(30)
    before = rig.cache.storage.copy()
    rig.loads.cancel(["running", "waiting", "unknown"])
    assert set(rig.loaded(2, seconds=1.0)) == {"running", "waiting"}
    held.set()
    third = rig.load(hashes[:1], [60, 61])  # goes after them, on the same thread
    rig.loaded()
    assert (running.good, waiting.good, third.good) == (0, 0, 1)
    assert running.failed_blocks == list(range(20, 32))
    for layer in range(rig.cache.layers):
        rig.cache.array(layer)[60:62] = 0
    after = rig.cache.storage.copy()
    rig.cache.storage[:] = before
    for layer in range(rig.cache.layers):
        rig.cache.array(layer)[60:62] = 0
    assert (after == rig.cache.storage).all()
    assert rig.counted()["loads_cancelled"] == 2


@STAGED
def test_a_late_load_is_reported_in_time_and_writes_nothing_after_that(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(load_threads=1)
    hashes = rig.put(2)
    held = threading.Event()
    get_into = StoreClient.get_into

    def stuck(*args: object, **kwargs: object) -> object:
        got = get_into(*args, **kwargs)  # type: ignore[arg-type]
        assert held.wait(30)
        return got

    monkeypatch.setattr(StoreClient, "get_into", stuck)
    began = time.monotonic()
    load = rig.load(hashes, range(20, 24), timeout=0.3)
    rig.loaded(seconds=5.0)
    assert time.monotonic() - began >= 0.3
    assert load.good == 0
    before = rig.cache.storage.copy()
    held.set()
    rig.load(keys(1, "none"), [0, 1])
    rig.loaded()  # the thread has come back from the first one
    assert (rig.cache.storage == before).all()
    assert rig.counted()["loads_late"] == 1


def test_loads_that_a_step_cannot_do_without_are_waited_for(rigs: Rigs) -> None:
    rig = rigs()
    hashes = rig.put(6)
    loads = [rig.load(hashes, range(20 + 12 * number, 32 + 12 * number)) for number in range(3)]
    rig.loads.wait(loads)
    assert [load.good for load in loads] == [6, 6, 6]
    assert len(rig.loads.ended()) == 3


@STRAIGHT
@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_load_is_not_reported_while_bytes_may_come(rigs: Rigs, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    rig = rigs(load_threads=1)
    hashes = rig.put(6)
    held, came = threading.Event(), threading.Event()
    get_into = StoreClient.get_into

    def slowly(*args: object, **kwargs: object) -> object:
        came.set()
        assert held.wait(30)
        return get_into(*args, **{**kwargs, "timeout": 10.0})  # type: ignore[arg-type]

    monkeypatch.setattr(StoreClient, "get_into", slowly)
    load = rig.load(hashes, range(20, 32), timeout=30.0 if how == "cancelled" else 0.1)
    assert came.wait(30)
    if how == "cancelled":
        rig.loads.cancel([load.job.request_id])
    time.sleep(max(0.0, load.until - time.monotonic()) if how == "late" else 0.0)
    assert not rig.loads.ended()
    held.set()
    rig.loaded()
    assert load.good == 3  # what goes together came, the rest was not begun
    assert load.failed_blocks == list(range(26, 32))
    assert rig.counted()[f"loads_{how}"] == 1


@STAGED
def test_a_wait_ends_with_the_time_of_the_load(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(load_threads=1)
    held = threading.Event()
    monkeypatch.setattr(StoreClient, "get_into", lambda *_, **__: held.wait(30))
    load = rig.load(keys(2, "a"), range(4), timeout=0.2)
    rig.loads.wait([load])
    assert load.good == 0
    held.set()


def test_a_fault_of_the_plan_ends_its_job_alone(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(load_threads=1)
    hashes = rig.put(2)
    bad = [rig.load(hashes, [0, 1, 2, 64]), rig.load(hashes, [0, 1])]
    rig.loaded(2)
    assert [load.good for load in bad] == [0, 0]
    rig.save(keys(1, "bad"), [64, 65])
    assert not rig.saved().popitem()[1].saved
    assert len([record for record in caplog.records if record.exc_info]) == 3
    good = rig.load(hashes, range(4))
    rig.loaded()
    assert good.good == 2


def test_staging_has_room_for_one_chunk_of_each_thread(shared_cluster: LocalCluster) -> None:
    engine = shared_cluster.client().engine
    with pytest.raises(ConfigError, match="staging_bytes of 3000 or more"):
        make_areas(engine, 2999, 1000, 2, 3)
    areas = make_areas(engine, 70000, 1000, 2, 3)
    assert [area.offsets.tolist() for area in areas] == [[0, 1000], [2000, 3000], [4000, 5000]]
    areas[0].region.release()
