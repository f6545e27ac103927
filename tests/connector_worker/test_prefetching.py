# SPDX-License-Identifier: Apache-2.0
"""Fetches: chunks wait in host memory for the request that needs them, and give way to others when nobody does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from worker_testing import Cache
from worker_testing.faults import breaks, held_in, spoil
from worker_testing.rig import CHUNK_BLOCKS, Rig

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.connector.jobs import FetchJob, LoadJob
from moonpool.connector.prefetching import Prefetches
from moonpool.errors import ConfigError

Rigs = Callable[..., Rig]
Makes = Callable[..., "Fetcher"]
TIMEOUT = 2.0
SLACK = 12.0


class Fetcher:
    """The prefetches of a rig, with a buffer of so many chunks."""

    def __init__(self, rig: Rig, slots: int, threads: int) -> None:
        self.rig = rig
        size = slots * rig.paged.chunk_bytes
        self.prefetches = Prefetches(
            rig.engine, rig.loads._pool, rig.paged, rig.counts, threads=threads, buffer_bytes=size
        )
        self.prefetches._chunks = 3
        self._ids = 0

    def begin(self, hashes: Sequence[bytes], timeout: float = 20.0) -> int:
        self._ids += 1
        self.prefetches.begin([FetchJob(self._ids, "r", b"".join(hashes), timeout)])
        return self._ids

    def ended(self, count: int = 1, seconds: float = 30.0) -> dict[int, int]:
        """Return how many chunks the next fetches that end have."""
        ended: dict[int, int] = {}
        deadline = time.monotonic() + seconds
        while len(ended) < count:
            ended.update({fetch.job.fetch_id: fetch.good for fetch in self.prefetches.ended()})
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return ended

    def load(self, fetch_id: int, hashes: Sequence[bytes], blocks: Iterable[int], begin_block: int = 0) -> None:
        self.prefetches.load([LoadJob("r", b"".join(hashes), begin_block, list(blocks), False, 5.0, fetch_id)])


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One that a test may break."""
    with local_cluster(nodes=1, dram="64MiB") as cluster:
        yield cluster


@pytest.fixture
def fetchers() -> Iterator[Makes]:
    made: list[Fetcher] = []

    def make(rig: Rig, slots: int = 8, threads: int = 2) -> Fetcher:
        made.append(Fetcher(rig, slots, threads))
        return made[-1]

    yield make
    for one in made:
        one.rig.link.close()
        one.prefetches.close()


def test_what_was_fetched_is_loaded_and_nothing_else_is_written(rigs: Rigs, fetchers: Makes) -> None:
    writer, reader = rigs(), rigs(cache=Cache("BLHNC", blocks=64, heads=2, tokens=16, content=64))
    hashes = writer.put(5)
    fetcher = fetchers(reader)
    fetch = fetcher.begin(hashes)
    assert fetcher.ended() == {fetch: 5}
    assert not reader.cache.storage.any()
    assert fetcher.prefetches.used == 5
    assert reader.link.client is not None
    reader.link.client.remove(reader.loads._pool.namespace, hashes)  # it is not asked again
    # From the second block of the second chunk to the first of the fourth.
    fetcher.load(fetch, hashes[1:4], [40, 60, 20, 30], begin_block=1)
    assert reader.cache.chunk([40, 60, 20, 30]) == writer.cache.chunk([3, 4, 5, 6])
    for layer in range(reader.cache.layers):
        reader.cache.array(layer)[[40, 60, 20, 30]] = 0
    assert not reader.cache.storage.any()
    (load,) = fetcher.prefetches.loaded()
    assert (load.good, load.failed_blocks) == (3, [])
    assert fetcher.prefetches.used == 0


def test_chunks_of_two_requests_are_fetched_once(rigs: Rigs, fetchers: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    hashes = rig.put(4)
    fetcher = fetchers(rig)
    rig.counted()
    came, go_on = held_in(monkeypatch, "get_into")
    first = fetcher.begin(hashes[:3])
    assert came.wait(20)
    second = fetcher.begin(hashes)  # waits for the chunks of the other one
    go_on.set()
    assert fetcher.ended(2) == {first: 3, second: 4}
    assert rig.counted()["prefetch_bytes"] == 4 * rig.paged.chunk_bytes
    fetcher.prefetches.drop([first])
    fetcher.load(second, hashes, range(30, 38))
    assert rig.cache.chunk(list(range(30, 38))) == rig.cache.chunk(list(range(8)))


def test_what_nobody_waits_for_goes_first_and_what_is_waited_for_never(rigs: Rigs, fetchers: Makes) -> None:
    rig = rigs()
    hashes = rig.put(8)
    fetcher = fetchers(rig, slots=4)
    waits = fetcher.begin(hashes[:2])
    fetcher.ended()
    gone = fetcher.begin(hashes[2:4])
    fetcher.ended()
    fetcher.prefetches.drop([gone])
    rig.counted()
    # There still: nothing comes.
    again = fetcher.begin(hashes[2:4])
    assert fetcher.ended() == {again: 2}
    assert rig.counted() == {"prefetches_ok": 1}
    fetcher.prefetches.drop([again])
    # The last chunk of a prefix goes first.
    one = fetcher.begin(hashes[4:5])
    assert fetcher.ended() == {one: 1}
    assert fetcher.prefetches._buffer._entries.keys() == {hashes[0], hashes[1], hashes[2], hashes[4]}
    # Only what fits comes, and what is waited for stays.
    rest = fetcher.begin(hashes[5:8])
    assert fetcher.ended() == {rest: 1}
    none = fetcher.begin(hashes[6:8])
    assert fetcher.ended() == {none: 0}
    assert rig.counted()["prefetches_full"] == 2
    fetcher.load(waits, hashes[:2], range(30, 34))
    assert rig.cache.chunk(list(range(30, 34))) == rig.cache.chunk(list(range(4)))


@pytest.mark.parametrize("how", ["dropped", "late"])
def test_room_is_not_given_away_while_bytes_may_come(
    rigs: Rigs, fetchers: Makes, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rig = rigs()
    hashes = rig.put(6)
    fetcher = fetchers(rig, slots=6, threads=1)
    came, go_on = held_in(monkeypatch, "get_into")
    fetch = fetcher.begin(hashes, timeout=60.0 if how == "dropped" else 0.2)
    assert came.wait(20)
    waits = fetcher.begin(hashes[:1], timeout=60.0)
    if how == "dropped":
        fetcher.prefetches.drop([fetch, waits])
    else:
        time.sleep(0.3)
    assert fetcher.prefetches.used == 3
    go_on.set()
    ended = fetcher.ended(2)
    assert ended[fetch] <= 3  # the rest was not begun
    if how == "late":
        fetcher.prefetches.drop([fetch, waits])
    assert fetcher.prefetches.used == 0


@pytest.mark.parametrize("how", ["absent", "spoilt"])
def test_a_fetch_ends_at_the_first_chunk_that_cannot_be_had(
    rigs: Rigs, fetchers: Makes, cluster: LocalCluster, how: str
) -> None:
    rig = rigs(cluster)
    hashes = rig.put(6)
    assert rig.link.client is not None
    if how == "absent":
        rig.link.client.remove(rig.loads._pool.namespace, [hashes[4]]).require()
    else:
        spoil(rig.link.client, rig, hashes[4])
    fetcher = fetchers(rig)
    fetch = fetcher.begin(hashes)
    assert fetcher.ended() == {fetch: 4}
    fetcher.load(fetch, hashes[:4], range(30, 30 + 4 * CHUNK_BLOCKS))
    assert rig.cache.chunk(list(range(30, 38))) == rig.cache.chunk(list(range(8)))
    # Who waits for what cannot be had is not told that it is there.
    again = fetcher.begin(hashes[4:])
    assert fetcher.ended() == {again: 0}
    assert rig.counted()["prefetches_missing"] == 2


@pytest.mark.parametrize("what", ["kill master", "stop master", "kill node", "stop node"])
def test_a_fetch_that_the_pool_leaves_alone_ends_in_its_time(
    rigs: Rigs, fetchers: Makes, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", "tcp")
    rig = rigs(cluster)
    hashes = rig.put(6)
    fetcher = fetchers(rig)
    came, go_on = held_in(monkeypatch, "get_into", after=1)
    fetch = fetcher.begin(hashes, timeout=TIMEOUT)
    assert came.wait(20)
    breaks(cluster, what)
    go_on.set()
    assert fetcher.ended(seconds=TIMEOUT + SLACK) == {fetch: 3}
    fetcher.load(fetch, hashes[:3], range(30, 36))
    assert rig.cache.chunk(list(range(30, 36))) == rig.cache.chunk(list(range(6)))


def test_chunks_of_another_layout_are_not_fetched(
    rigs: Rigs, fetchers: Makes, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = rigs(), rigs(cache=Cache(blocks=64, heads=4, tokens=16, content=32))
    hashes = writer.put(2)
    fetcher = fetchers(reader)
    fetch = fetcher.begin(hashes)
    assert fetcher.ended() == {fetch: 0}
    assert "another layout" in caplog.text


def test_a_buffer_has_room_for_a_chunk(rigs: Rigs) -> None:
    rig = rigs()
    with pytest.raises(ConfigError, match="prefetch_bytes is 100"):
        Prefetches(rig.engine, rig.loads._pool, rig.paged, rig.counts, threads=1, buffer_bytes=100)
