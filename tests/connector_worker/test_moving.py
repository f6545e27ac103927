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

from moonpool.connector.loading import Loads
from moonpool.connector.moving import window_chunks
from moonpool.errors import ConfigError
from moonpool.store_client import StoreClient

Rigs = Callable[..., Rig]


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
    assert counted["load_straight_bytes"] == 10 * reader.paged.chunk_bytes
    assert writer.counted() == {
        "saves_ok": 1, "save_chunks": 10, "save_bytes": 10 * writer.paged.chunk_bytes
    }  # fmt: skip
    assert not reader.loads.ended()


def test_blocks_that_the_cache_has_are_left_alone(rigs: Rigs) -> None:
    writer, reader = rigs(), rigs()
    hashes = writer.put(3)
    reader.cache.fill(99)
    before = reader.cache.storage.copy()
    # The second block of the first chunk, the second chunk, the first block of the third one: the first two chunks go
    # together, and the third one, of which again only a part is needed, after them.
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
    counted = reader.counted()
    assert (counted["load_straight_bytes"], counted["load_staged_bytes"]) == (
        reader.paged.chunk_bytes, 2 * reader.paged.chunk_bytes
    )  # fmt: skip


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


def test_chunks_of_a_worker_with_another_layout_are_not_loaded(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    # As long, and in the same namespace: only the workers know that their kernels split blocks differently.
    shape = {"blocks": 64, "heads": 2, "content": 64}
    whole, split = rigs(cache=Cache(tokens=16, **shape)), rigs(cache=Cache(tokens=8, split=2, **shape))
    hashes = whole.put(3)
    assert whole.paged.chunk_bytes == split.paged.chunk_bytes
    for begin_block, blocks in ((0, range(30, 36)), (1, range(40, 45))):
        load = split.load(hashes, blocks, begin_block=begin_block)
        split.loaded()
        assert load.good == 0
    assert split.counted()["load_chunks_failed"] == 2
    assert "CACHE_LAYOUT" in caplog.text
    assert not split.cache.array(0)[2 * 40 : 2 * 41].any()  # what is copied from the staging area was not


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
    assert rig.counted() == {"saves_ok": 1, "save_chunks": 2, "save_bytes": 2 * rig.paged.chunk_bytes}
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


def test_loads_that_a_step_cannot_do_without_are_waited_for(rigs: Rigs) -> None:
    rig = rigs()
    hashes = rig.put(6)
    loads = [rig.load(hashes, range(20 + 12 * number, 32 + 12 * number)) for number in range(3)]
    rig.loads.wait(loads)
    assert [load.good for load in loads] == [6, 6, 6]
    assert len(rig.loads.ended()) == 3


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
    counted = rig.counted()
    assert counted[f"loads_{how}"] == counted["loads_partial"] == 1


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_load_that_waits_for_others_ends_by_itself(rigs: Rigs, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    rig = rigs(load_threads=1)
    hashes = rig.put(2)
    held, came = threading.Event(), threading.Event()
    get_into = StoreClient.get_into

    def slowly(*args: object, **kwargs: object) -> object:
        came.set()
        assert held.wait(30)
        return get_into(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreClient, "get_into", slowly)
    running = rig.load(hashes, range(20, 24), timeout=60.0)
    assert came.wait(30)
    load = rig.load(hashes, range(30, 34), timeout=60.0 if how == "cancelled" else 0.1)
    if how == "cancelled":
        rig.loads.cancel([load.job.request_id, "unknown"])
    else:
        rig.loads.wait([load])  # as for a step that cannot do without it
    assert rig.loaded() == {load.job.request_id: load}
    assert load.good == 0
    held.set()
    rig.loaded()
    assert running.good == 2
    before = rig.cache.storage.copy()
    rig.load(keys(1, "none"), [0, 1])
    rig.loaded()  # the thread was past the one that it must not touch
    assert (rig.cache.storage == before).all()
    assert rig.counted()[f"loads_{how}"] == 1


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


def test_staging_has_room_for_one_chunk_of_each_thread(rigs: Rigs) -> None:
    rig = rigs()
    nbytes = 3 * rig.paged.area_bytes(window_chunks(rig.paged.chunk_bytes))
    with pytest.raises(ConfigError, match=f"staging_bytes of {nbytes} or more"):
        Loads(rig.engine, rig.loads._pool, rig.paged, rig.counts, threads=3, staging_bytes=nbytes - 1)
