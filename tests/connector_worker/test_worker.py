# SPDX-License-Identifier: Apache-2.0
"""`WorkerSide` as the facade calls it, step by step. vLLM has the base classes of what it returns."""

from __future__ import annotations

import functools
import gc
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm
from store_testing import keys
from worker_testing import Cache
from worker_testing.faults import held_in

from moonpool.cluster import LocalCluster
from moonpool.connector.layout import CacheLayoutError
from moonpool.connector.lease_plan import digest_of
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.shards import ShardPlan
from moonpool.store_client import ROOT

need_vllm()

from moonpool.connector.metadata import LendJob, Lent, LoadJob, MoonpoolMetadata, SaveJob  # noqa: E402 - has vLLM's classes
from moonpool.connector.stats import ConnectorPromMetrics, ConnectorStats  # noqa: E402 - has vLLM's classes
from moonpool.connector.worker import WorkerSide  # noqa: E402 - has vLLM's classes

pytestmark = THEIR_WARNINGS

Workers = Callable[..., WorkerSide]


def cache() -> Cache:
    return Cache(blocks=64, heads=2, tokens=16, content=64)


def step(worker: WorkerSide, metadata: MoonpoolMetadata) -> Any:
    """One step of vLLM: returns (finished, failed, failed blocks, metadata)."""
    worker.handle_preemptions(metadata)
    worker.start_load(metadata)
    worker.wait_for_layer_load("model.layers.0.attn")
    worker.wait_for_save(metadata)
    return *worker.finished_loads(), worker.take_failed_blocks(), worker.take_metadata()


def make_worker(
    cluster: LocalCluster, namespace: str, own: Cache, plan: ShardPlan | None = None, rank: int = 0, **settings: Any
) -> WorkerSide:
    spec = types.SimpleNamespace(kv_cache_spec=types.SimpleNamespace(block_size=own.tokens))
    worker = WorkerSide(
        types.SimpleNamespace(cache_config=types.SimpleNamespace(), parallel_config=types.SimpleNamespace(rank=rank)),
        types.SimpleNamespace(num_blocks=own.blocks, kv_cache_groups=[spec], kv_cache_layout=own.layout),
        ConnectorSettings.load({"chunk_tokens": 2 * own.tokens, "staging_bytes": 1 << 20, **settings}),
        {"master": cluster.master, **cluster.client_options},
        namespace,
        plan or ShardPlan(0, 1, True),
    )
    worker.register_kv_caches(own.views())
    deadline = time.monotonic() + 30
    while worker._pool.link.client is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return worker


@pytest.fixture
def workers(shared_cluster: LocalCluster, namespace: str) -> Iterator[Workers]:
    made: list[WorkerSide] = []

    def make(own: Cache, plan: ShardPlan | None = None, **settings: Any) -> WorkerSide:
        made.append(make_worker(shared_cluster, namespace, own, plan, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown()
        worker.shutdown()


def run(worker: WorkerSide, metadata: MoonpoolMetadata, until: Callable[[Any], bool], seconds: float = 30.0) -> Any:
    """Step until something is reported, and return that."""
    deadline = time.monotonic() + seconds
    while True:
        reported = step(worker, metadata)
        if until(reported):
            return reported
        metadata = MoonpoolMetadata()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def save(worker: WorkerSide, hashes: list[bytes], blocks: list[int], job_id: int = 0) -> Any:
    metadata = MoonpoolMetadata(saves=[SaveJob(job_id, "writer", b"".join(hashes), ROOT, blocks)])
    return run(worker, metadata, lambda reported: reported[3] is not None)[3]


def test_an_engine_that_ends_waits_for_saves_under_way(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, hashes = cache().fill(2), cache(), keys(2)
    writer, reader = workers(source, shutdown_wait=60.0), workers(target)
    came, go_on = held_in(monkeypatch, "put")
    writer.wait_for_save(MoonpoolMetadata(saves=[SaveJob(1, "writer", b"".join(hashes), ROOT, list(range(4)))]))
    assert came.wait(20)
    threading.Timer(0.1, go_on.set).start()
    writer.shutdown()
    load = MoonpoolMetadata(loads=[LoadJob("r", b"".join(hashes), 0, list(range(8, 12)), True, 10.0)])
    finished, failed, *_ = run(reader, load, lambda reported: bool(reported[0]))
    assert (finished, failed) == ({"r"}, set())


def test_an_engine_that_ends_does_not_wait_for_ever(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, hashes = workers(cache().fill(3), shutdown_wait=0.05), keys(2)
    came, go_on = held_in(monkeypatch, "put")
    writer.wait_for_save(MoonpoolMetadata(saves=[SaveJob(1, "writer", b"".join(hashes), ROOT, list(range(4)))]))
    assert came.wait(20)
    ended = threading.Thread(target=writer.shutdown)
    ended.start()
    while not writer._parts.saves._closing:  # type: ignore[union-attr]
        assert ended.is_alive()
        time.sleep(0.001)
    go_on.set()
    ended.join(30)
    assert not ended.is_alive()


def test_saves_and_loads_are_reported_once(workers: Workers) -> None:
    source, target = cache().fill(1), cache()
    writer, reader = workers(source), workers(target)
    hashes = keys(4)
    reported = save(writer, hashes, list(range(8)), 17)
    assert (reported.ended_saves, reported.unsaved, reported.loaded) == ({17: 1}, set(), {})
    metadata = MoonpoolMetadata(loads=[LoadJob("r", b"".join(hashes), 0, list(range(20, 28)), True, 10.0)])
    reader.start_load(metadata)
    reader.start_load(metadata)  # vLLM may call it before and after the forward
    finished, failed, blocks, reported = run(reader, metadata, lambda reported: bool(reported[0]))
    assert (finished, failed, blocks) == ({"r"}, set(), set())
    assert (reported.loaded, reported.ended_saves) == ({"r": 4}, {})
    assert target.chunk(list(range(20, 28))) == source.chunk(list(range(8)))
    assert step(reader, MoonpoolMetadata()) == (set(), set(), set(), None)


@pytest.mark.parametrize("is_async", [True, False])
def test_what_does_not_come_is_told_with_its_blocks(workers: Workers, is_async: bool) -> None:
    source, target = cache().fill(1), cache()
    writer, reader = workers(source), workers(target)
    hashes = keys(3, "failing")
    save(writer, hashes[:1], [0, 1])
    metadata = MoonpoolMetadata(loads=[LoadJob("r", b"".join(hashes), 1, [20, 21, 22, 23], is_async, 10.0)])
    finished, failed, blocks, reported = run(reader, metadata, lambda reported: reported[3] is not None)
    assert finished == failed == ({"r"} if is_async else set())
    assert blocks == {21, 22, 23}
    assert reported.loaded == {"r": 1}


def test_a_sync_load_is_there_when_start_load_returns(workers: Workers) -> None:
    source, target = cache().fill(1), cache()
    writer, reader = workers(source), workers(target)
    hashes = keys(4, "sync")
    save(writer, hashes, list(range(8)))
    metadata = MoonpoolMetadata(loads=[LoadJob("r", b"".join(hashes), 0, list(range(20, 28)), False, 10.0)])
    reader.start_load(metadata)
    assert target.chunk(list(range(20, 28))) == source.chunk(list(range(8)))
    finished, failed, blocks, reported = step(reader, metadata)
    assert (finished, failed, blocks, reported.loaded) == (set(), set(), set(), {"r": 4})


def test_what_fails_layer_by_layer_is_told_in_the_same_step(workers: Workers) -> None:
    source, target = cache().fill(1), cache()
    writer, reader = workers(source), workers(target, load_mode="layerwise")
    hashes = keys(4, "layers")
    save(writer, hashes[:2], list(range(4)))
    metadata = MoonpoolMetadata(loads=[LoadJob("r", b"".join(hashes), 1, list(range(20, 27)), False, 10.0)])
    reader.start_load(metadata)
    reader.start_load(metadata)
    for layer in range(target.layers):
        reader.wait_for_layer_load(f"model.layers.{layer}.attn")
    reader.wait_for_save(metadata)
    finished, failed = reader.finished_loads()
    assert (finished, failed) == (set(), set())
    assert reader.take_failed_blocks() == {23, 24, 25, 26}
    reported = reader.take_metadata()
    assert reported is not None
    assert reported.loaded == {"r": 2}
    assert target.chunk([20, 21, 22]) == source.chunk([1, 2, 3])
    assert step(reader, MoonpoolMetadata()) == (set(), set(), set(), None)


def test_a_cache_is_not_replaced(workers: Workers) -> None:
    worker = workers(cache())
    with pytest.raises(CacheLayoutError, match="registered already"):
        worker.register_kv_caches(cache().views())


def test_who_does_not_write_needs_no_blocks(workers: Workers) -> None:
    worker = workers(cache(), ShardPlan(0, 1, False))
    metadata = MoonpoolMetadata(saves=[SaveJob(5, "r", keys(1)[0], ROOT, [0, 1])])
    reported = step(worker, metadata)[3]
    assert (reported.ended_saves, reported.unsaved) == ({5: 1}, set())
    assert worker._pool.link.client is not None
    assert not worker._pool.link.client.exists(worker._pool.namespace, keys(1)).any()


def test_stats_say_what_was_moved_and_that_it_is_over(workers: Workers) -> None:
    worker = workers(cache().fill(1))
    assert worker.take_stats() is None
    save(worker, keys(2, "stats"), [0, 1, 2, 3])
    stats = worker.take_stats()
    assert stats is not None
    assert stats.data["saves_ok"] == 1
    assert stats.data["save_chunks"] == 2
    assert len(stats.data["save_seconds"]) == 1
    assert worker.take_stats() is None
    metadata = MoonpoolMetadata(loads=[LoadJob("r", b"".join(keys(2, "stats")), 0, [8, 9, 10, 11], True, 10.0)])
    worker.start_load(metadata)
    stats = worker.take_stats()
    assert stats is not None
    assert stats.data["loads_open"] == 1
    assert stats.data["oldest_transfer_seconds"] > 0
    run(worker, metadata, lambda reported: bool(reported[0]))
    stats = worker.take_stats()
    assert stats is not None
    assert (stats.data["loads_open"], stats.data["oldest_transfer_seconds"], stats.data["loads_ok"]) == (0, 0, 1)
    assert worker.take_stats() is None


def test_stats_of_workers_and_of_times_are_added_up() -> None:
    total = ConnectorStats(data={"loads_ok": 1, "loads_open": 3, "load_seconds": [0.5]})
    assert not total.is_empty()
    again = total.aggregate(ConnectorStats(data={"loads_ok": 2, "loads_open": 2, "load_seconds": [0.1, 0.2]}))
    assert again.data == {"loads_ok": 3, "loads_open": 3, "load_seconds": [0.5, 0.1, 0.2]}
    assert again.reduce() == {"loads_ok": 3, "loads_open": 3, "load_seconds_median": 0.2, "load_seconds_max": 0.5}
    again.reset()
    assert again.is_empty()


def test_every_number_has_a_metric(workers: Workers, namespace: str) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = types.SimpleNamespace(kv_transfer_config=None)
    metrics = ConnectorPromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    worker = workers(cache().fill(1))
    save(worker, keys(2, namespace), [0, 1, 2, 3])
    loads = [LoadJob("r", b"".join(keys(3, namespace)), 0, list(range(8, 14)), True, 10.0)]
    run(worker, MoonpoolMetadata(loads=loads), lambda reported: bool(reported[0]))
    stats = worker.take_stats()
    assert stats is not None
    metrics.observe(stats.data, 1)

    def value(name: str, engine: str = "1") -> float | None:
        return registry.get_sample_value(f"moonpool_connector_{name}", {"model_name": "m", "engine": engine})

    nbytes = stats.data["save_bytes"]
    assert value("save_bytes_total") == value("load_straight_bytes_total") == nbytes > 0
    assert value("loads_missing_total") == value("loads_partial_total") == value("save_seconds_count") == 1
    assert value("loads_open") == value("loads_ok_total") == value("save_bytes_total", "0") == 0


def test_a_worker_that_is_forgotten_leaves_no_thread(shared_cluster: LocalCluster, namespace: str) -> None:
    def own() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith(("moonpool-", "mp-"))}

    before = own()
    worker = make_worker(shared_cluster, namespace, cache().fill(1))
    save(worker, keys(1, "forgotten"), [0, 1])
    assert own() - before >= {"moonpool-load-0", "moonpool-save-0"}
    del worker
    gc.collect()
    assert own() == before


def test_a_worker_lends_wipes_and_hears_and_the_reader_gives_back(shared_cluster: LocalCluster, namespace: str) -> None:
    first, second = cache().fill(5), cache()
    lender = make_worker(shared_cluster, namespace, first, peer_listen="127.0.0.1:0")
    reader = make_worker(shared_cluster, namespace, second)
    try:
        assert reader.place is None
        place = lender.place
        assert place is not None
        digest = digest_of(b"k" * 32, [3, 4])
        step(lender, MoonpoolMetadata(lending=[LendJob(7, b"t" * 16, digest)]))
        lent = Lent(((place.address, place.incarnation),), 7, b"t" * 16, digest, [3, 4], 30.0)
        job = LoadJob("r", b"".join(keys(1)), 0, [10, 11], True, 10.0, lent=lent)
        begun = MoonpoolMetadata(loads=[job], holding=[lent])
        finished, failed, *_ = run(reader, begun, lambda reported: bool(reported[0]))
        assert (finished, failed) == ({"r"}, set())
        assert second.chunk([10, 11]) == first.chunk([3, 4])
        step(reader, MoonpoolMetadata(returning=[lent.token]))
        said = run(lender, MoonpoolMetadata(), lambda reported: reported[3] is not None and bool(reported[3].returned))
        assert said[3].returned == {lent.token}
        assert step(lender, MoonpoolMetadata(wiping=[7]))[3].wiped == {7: 1}
    finally:
        lender.shutdown()
        reader.shutdown()
