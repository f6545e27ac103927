# SPDX-License-Identifier: Apache-2.0
"""Chunks that lie in spans of registered memory, as in a paged cache: the same bytes, and nothing beside them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_testing import content, key, keys, locate, spoil, unheard

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import ROOT, ChunkConflictError, ChunkRangeError, Outcome, StoreArgumentError, StoreClient
from moonpool.store_client.moves import Items, Place
from moonpool.store_client.packing import HEADER_BYTES
from moonpool.store_client.spans import Spans
from moonpool.store_client.values import values_of
from moonpool.transfer_engine import LEAF_BYTES, Region, TransferEngine, digest, digest_joined
from moonpool.transfer_engine.testing import Faults, FaultyEngine

LEAF = LEAF_BYTES
SIZES = [1, 77, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 500, 2 * LEAF]
Int64s = npt.NDArray[np.int64]


class Paged(NamedTuple):
    """Spans at random places of several regions, none of which overlap, for chunks of some sizes."""

    regions: list[Region]
    which: Int64s
    offsets: Int64s
    lengths: Int64s
    counts: Int64s

    @classmethod
    def of(cls, engine: TransferEngine, sizes: list[int], seed: int, span_max: int, regions: int = 3) -> Paged:
        chance = np.random.default_rng(seed)
        lengths: list[int] = []
        counts = []
        for size in sizes:
            before = len(lengths)
            while size > 0:
                lengths.append(min(size, int(chance.integers(1, span_max + 1))))
                size -= lengths[-1]  # noqa: PLW2901 - what is left of it
            counts.append(len(lengths) - before)
        which = chance.integers(0, regions, len(lengths))
        offsets, used = np.zeros(len(lengths), dtype=np.int64), [0] * regions
        for span in chance.permutation(len(lengths)).tolist():
            region = int(which[span])
            used[region] += int(chance.integers(0, 9))
            offsets[span] = used[region]
            used[region] += lengths[span]
        made = [engine.allocate(most + 10) for most in used]
        return cls(made, which, offsets, np.array(lengths), np.array(counts))

    @property
    def form(self) -> Any:
        return (self.regions, self.which), self.offsets, self.lengths, self.counts

    def views(self) -> Iterator[memoryview]:
        """Yield the memory of each span."""
        for region, offset, length in zip(
            self.which.tolist(), self.offsets.tolist(), self.lengths.tolist(), strict=True
        ):
            yield memoryview(self.regions[region]).cast("B")[offset : offset + length]

    def write(self, values: list[bytes]) -> None:
        joined, at = b"".join(values), 0
        for view in self.views():
            view[:] = joined[at : at + view.nbytes]
            at += view.nbytes

    def values(self) -> list[bytes]:
        spans = [bytes(view) for view in self.views()]
        ends = np.cumsum(self.counts).tolist()
        return [b"".join(spans[end - count : end]) for end, count in zip(ends, self.counts.tolist(), strict=True)]

    def fill(self, byte: bytes) -> None:
        for region in self.regions:
            memoryview(region).cast("B")[:] = byte * region.nbytes

    def beside(self, byte: bytes) -> bool:
        """Whether all that belongs to no span is still `byte`."""
        held = [np.frombuffer(memoryview(region), dtype=np.uint8) == byte[0] for region in self.regions]
        for region, offset, length in zip(
            self.which.tolist(), self.offsets.tolist(), self.lengths.tolist(), strict=True
        ):
            held[region][offset : offset + length] = True
        return all(bool(one.all()) for one in held)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), max_size=6),
)
@settings(deadline=None)
def test_cuts_are_the_bytes_of_the_ranges(lengths: list[int], cuts: list[tuple[int, int]]) -> None:
    total = sum(lengths)
    ranges = [(start % total, min(length, total - start % total)) for start, length in cuts]
    sizes = np.array(lengths)
    # Span i begins at byte 1000 * i of region i % 2.
    spans = Spans([], np.arange(len(lengths)) % 2, np.arange(len(lengths)) * 1000, sizes)
    places = [(i % 2, 1000 * i + at) for i, length in enumerate(lengths) for at in range(length)]
    cut = spans.cut(np.array([a for a, _ in ranges], dtype=np.int64), np.array([n for _, n in ranges], dtype=np.int64))
    found: list[list[tuple[int, int]]] = [[] for _ in ranges]
    for owner, region, offset, length, skip in zip(
        cut.owners.tolist(),
        cut.which.tolist(),
        cut.offsets.tolist(),
        cut.lengths.tolist(),
        cut.skips.tolist(),
        strict=True,
    ):
        assert length > 0
        assert skip == len(found[owner])
        found[owner] += [(region, offset + at) for at in range(length)]
    assert found == [places[start : start + length] for start, length in ranges]
    assert cut.counts.tolist() == [cut.owners.tolist().count(number) for number in range(len(ranges))]


def test_digests_of_what_lies_in_pieces() -> None:
    chance = np.random.default_rng(2)
    memories = [chance.bytes(2 * LEAF), bytearray(chance.bytes(1000))]
    which, offsets, lengths = [0, 1, 0, 1, 1], [5, 0, LEAF, 999, 0], [LEAF, 1000, 7, 1, 0]
    parts = [memories[w][o : o + n] for w, o, n in zip(which, offsets, lengths, strict=True)]
    found = np.frombuffer(digest_joined(memories, which, offsets, lengths, [3, 0, 2]), dtype="<u8")
    assert found.tolist() == [digest(b"".join(parts[:3])), digest(b""), digest(parts[3])]
    assert digest_joined([], [], [], [], []) == b""
    for wrong in (
        ([memories[1]], 0, 0, 1001, [1]),
        ([memories[1]], 1, 0, 1, [1]),
        (memories, [0, -1], 0, 1, [2]),
        (memories, 0, [0, 1], 1, [1]),
        (memories, 0, [0, 1], 1, [1, 2]),
        (memories, 0, [0, 1], 1, [3, -1]),
        (memories, 0, [0, 1], 1, 2),
        (memories, [0, 0, 0], [0, 1], 1, [2]),
        (["text"], 0, 0, 1, [1]),
        ([memoryview(memories[1])[::2]], 0, 0, 1, [1]),
    ):
        with pytest.raises((ValueError, TypeError, IndexError)):
            digest_joined(*wrong)


@pytest.mark.parametrize("span_max", [100_000, 5000, 2 * LEAF])
def test_put_from_and_get_into_spans(client: StoreClient, namespace: str, span_max: int) -> None:
    hashes = keys(len(SIZES), namespace)
    values = [content(hash_, size) for hash_, size in zip(hashes, SIZES, strict=True)]
    source = Paged.of(client.engine, SIZES, 1, span_max)
    source.write(values)
    client.put(namespace, hashes, source.form).require()
    assert list(client.get(namespace, hashes)) == values
    # The table of leaves is right too: ranges are proved with it.
    last = np.array(SIZES) - 1
    assert list(client.get(namespace, hashes, ranges=(last, 1))) == [value[-1:] for value in values]
    target = Paged.of(client.engine, SIZES, 2, span_max)
    target.fill(b"\xa5")
    found = client.get_into(namespace, hashes, target.form)
    found.require()
    assert found.lengths == SIZES
    assert target.values() == values
    assert target.beside(b"\xa5")


def test_what_is_put_from_spans_is_what_is_put_at_once(client: StoreClient, namespace: str) -> None:
    sizes = [LEAF // 2, 2 * LEAF + 9]
    hashes, others = keys(2, namespace), keys(2, namespace, "at once")
    values = [content(hash_, size) for hash_, size in zip(hashes, sizes, strict=True)]
    source = Paged.of(client.engine, sizes, 3, 3000, regions=1)
    source.write(values)
    region, (_, offsets, lengths, counts) = source.regions[0], source.form
    client.put(namespace, hashes, (region, offsets, lengths, counts), parents=ROOT).require()
    assert client.match_prefix(namespace, hashes) == 2
    client.put(namespace, others, values).require()
    tables = [raw(client, namespace, name) for name in (hashes, others)]
    assert tables[0] == tables[1]
    assert client.put(namespace, hashes, source.form, verify=True).count(Outcome.ALREADY) == 2
    memoryview(region).cast("B")[int(offsets[0])] ^= 1
    refused = client.put(namespace, hashes, source.form, verify=True)
    assert refused.outcomes == bytes([Outcome.FAILED, Outcome.ALREADY])
    assert isinstance(refused.errors[0], ChunkConflictError)


def raw(client: StoreClient, namespace: str, hashes: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return of each chunk the digest in its header, and what lies behind that."""
    found = []
    for extent in locate(client, namespace, hashes)[:, 0]:
        target = client._core.segments.target(int(extent["segment"]), client._core.link.cluster, time.monotonic() + 10)
        nbytes = HEADER_BYTES + int(extent["length"]) + 8 * -(-int(extent["length"]) // LEAF)
        room = client.engine.allocate(nbytes)
        client.engine.read(target.peer, room, target.region, 0, int(extent["offset"]), nbytes).wait()
        found.append((bytes(room)[24:32], bytes(room)[HEADER_BYTES:]))
    # A chunk of one leaf has no table.
    return [(digest_, rest if len(rest) > LEAF + 8 else rest[:-8]) for digest_, rest in found]


def test_shards_and_counts_that_are_one_number(client: StoreClient, namespace: str) -> None:
    hashes, page = keys(6, namespace), 4096
    region = client.allocate(64 * page)
    memory = np.frombuffer(memoryview(region), dtype=np.uint8)
    memory[:] = np.frombuffer(content(namespace.encode(), 64 * page), dtype=np.uint8)
    pages = np.random.default_rng(5).permutation(64)[:48]
    for shard in range(2):
        half = pages[24 * shard : 24 * shard + 24]
        client.put(namespace, hashes, (region, half * page, page, 4), shard=shard, shards=2).require()
    for shard in range(2):
        into = client.allocate(24 * page)
        back = np.arange(24)[::-1]
        client.get_into(namespace, hashes, (into, back * page, page, 4), shard=shard).require()
        got = np.frombuffer(memoryview(into), dtype=np.uint8).reshape(24, page)[back]
        assert (got == memory.reshape(64, page)[pages[24 * shard : 24 * shard + 24]]).all()


def test_destinations_larger_and_smaller_than_their_chunks(client: StoreClient, namespace: str) -> None:
    hashes = keys(4, namespace)
    values = [content(hash_, 1000) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    region = client.allocate(5000)
    memoryview(region).cast("B")[:] = b"." * 5000
    offsets, lengths = np.array([0, 700, 1000, 2500, 3500]), np.array([700, 300, 999, 600, 1000])
    found = client.get_into(namespace, hashes, (region, offsets, lengths, [2, 1, 2, 0]))
    assert found.outcomes == bytes([Outcome.OK, Outcome.FAILED, Outcome.OK, Outcome.FAILED])
    assert all(isinstance(found.errors[index], ChunkRangeError) for index in (1, 3))
    assert found.lengths == [1000, 0, 1000, 0]
    got = bytes(region)
    assert got[:1000] == values[0]
    assert got[2500:3100] + got[3500:3900] == values[2]
    assert set(got[1000:2500] + got[3100:3500] + got[3900:]) == {ord(".")}


def test_ranges_into_spans(client: StoreClient, namespace: str) -> None:
    size = 4 * LEAF + 77
    hashes = keys(3, namespace)
    values = [content(hash_, size) for hash_ in hashes]
    client.put(namespace, hashes, values).require()
    # All whole leaves, so straight; then not.
    for starts, sizes in (([LEAF, 0, 4 * LEAF], [2 * LEAF, LEAF, 77]), ([LEAF - 3, 5, 0], [2 * LEAF, LEAF, size])):
        target = Paged.of(client.engine, sizes, 7, 40_000)
        target.fill(b"\xa5")
        client.get_into(namespace, hashes, target.form, ranges=(starts, sizes)).require()
        assert target.values() == [v[a : a + n] for v, a, n in zip(values, starts, sizes, strict=True)]
        assert target.beside(b"\xa5")


@pytest.mark.parametrize("transports", ["auto", "tcp", "no cpu"])
def test_damage_is_never_handed_out(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3 * LEAF + 500] * 4 + [900] * 2
    hashes = keys(len(sizes))
    values = [content(hash_, size) for hash_, size in zip(hashes, sizes, strict=True)]
    with local_cluster(nodes=1, dram="32MiB") as cluster:
        secret, given_ = cluster.secret.encode(), "auto" if transports == "no cpu" else transports
        with (
            TransferEngine(listen=None, transports=given_, secret=secret, connect_timeout=5.0) as engine,
            cluster.client(engine=engine) as client,
        ):
            if transports == "no cpu":  # as over RDMA
                target = client._core.segments.target
                monkeypatch.setattr(
                    client._core.segments, "target", lambda *where: dataclasses.replace(target(*where), by_cpu=False)
                )
            unheard(client, monkeypatch)
            source = Paged.of(engine, sizes, 8, 17_000)
            source.write(values)
            client.put("a", hashes, source.form).require()
            extents = locate(client, "a", hashes)[:, 0]
            spoil(client, extents[0], HEADER_BYTES + 2 * LEAF - 1)
            spoil(client, extents[1], 24)  # the digest in the header
            spoil(client, extents[4], HEADER_BYTES + 899)
            into = Paged.of(engine, sizes, 9, 23_000)
            found = client.get_into("a", hashes, into.form)
            assert found.where(Outcome.CORRUPT) == [0, 1, 4]
            assert found.where(Outcome.OK) == [2, 3, 5]
            got = into.values()
            assert all(got[index] == values[index] for index in (2, 3, 5))
            assert into.beside(b"\0")
            found = client.get_into("a", hashes[:4], Paged.of(engine, [LEAF] * 4, 1, 9000).form, ranges=(LEAF, LEAF))
            assert found.where(Outcome.CORRUPT) == [0, 1]


def test_copies_and_the_death_of_a_node() -> None:
    sizes = [LEAF + 5000] * 12
    hashes = keys(24)
    values = [content(hash_, size) for hash_, size in zip(hashes, sizes * 2, strict=True)]
    with local_cluster(nodes=2, dram="64MiB") as cluster, cluster.client() as client:
        source = Paged.of(client.engine, sizes, 10, 16_384)
        source.write(values[:12])
        put = client.put("a", hashes[:12], source.form, replicas=2)
        put.require()
        assert put.replicas == bytes([2] * 12)
        spoil(client, locate(client, "a", hashes[:1])[0, 0], HEADER_BYTES + LEAF)
        into = Paged.of(client.engine, sizes, 11, 16_384)
        for _ in range(3):
            client.get_into("a", hashes[:12], into.form).require()
            assert into.values() == values[:12]
            into.fill(b"\0")
        cluster.kill_node(0)
        alive = client.get_into("a", hashes[1:12], Paged(into.regions, *after_first(into)).form)
        alive.require()
        assert into.values()[1:] == values[1:12]
        source.write(values[12:])
        client.put("a", hashes[12:], source.form, timeout=60).require()
        assert list(client.get("a", hashes[12:])) == values[12:]


def after_first(paged: Paged) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    first = int(paged.counts[0])
    return paged.which[first:], paged.offsets[first:], paged.lengths[first:], paged.counts[1:]


def test_transfers_that_fail_leave_no_wrong_bytes(shared_cluster: LocalCluster, namespace: str) -> None:
    sizes = [2 * LEAF + 9] * 6
    with (
        FaultyEngine(Faults(), listen=None, secret=shared_cluster.secret.encode(), connect_timeout=5.0) as engine,
        shared_cluster.client(engine=engine, avoid="1ms") as client,
    ):
        source, into = Paged.of(engine, sizes, 12, 30_000), Paged.of(engine, sizes, 13, 30_000)
        seen = set()
        for round_ in range(12):
            hashes = keys(6, namespace, round_)
            values = [content(hash_, size) for hash_, size in zip(hashes, sizes, strict=True)]
            source.write(values)
            engine.set_faults(Faults(seed=round_, corrupt=0.2, partial=0.2, error=0.1))
            client.put(namespace, hashes, source.form)
            found = client.get_into(namespace, hashes, into.form)
            seen |= set(found.outcomes)
            got = into.values()
            assert all(got[index] == values[index] for index in found.where(Outcome.OK))
            assert into.beside(b"\0")
        assert Outcome.OK in seen
        assert len(seen) > 1
        engine.set_faults(Faults())


def test_a_batch_in_several_pieces(shared_cluster: LocalCluster, namespace: str) -> None:
    with shared_cluster.client(batch_bytes="1MiB", batch_chunks=7) as client:
        sizes = [150_000] * 20
        hashes = keys(20, namespace)
        values = [content(hash_, 150_000) for hash_ in hashes]
        source, into = (Paged.of(client.engine, sizes, seed, 9000) for seed in (14, 15))
        source.write(values)
        client.put(namespace, hashes, source.form, parents=ROOT).require()
        client.get_into(namespace, hashes, into.form).require()
        assert into.values() == values


def test_small_spans_count_for_more_than_their_bytes(client: StoreClient) -> None:
    region = client.allocate(10_000)
    memory = values_of(client.engine, (region, np.arange(10_000), 1, 1000), 10)
    pieces = list(memory.pieces(np.arange(10), memory.lengths, 4096, 3 << 20))
    assert [len(rows) for rows in pieces] == [3, 3, 3, 1]


def test_items_of_several_regions_lie_with_the_headers(client: StoreClient) -> None:
    first, second, headers = (client.allocate(4096) for _ in range(3))
    spans = Spans([first, second], np.array([0, 1, 1]), np.array([10, 0, 500]), np.array([100, 50, 60]))
    at, lengths = np.array([0, 120]), np.array([120, 90])
    place = Place(spans, at, lengths, headers, at, at, lengths, joined=False)
    items = Items(place, np.array([1, 0]), np.array([9000, 7000]))
    items.add_payloads(by_leaf=False)
    items.add_headers()
    (regions, which), offsets, remote, sizes = items.columns()
    rows = zip(which.tolist(), offsets.tolist(), remote.tolist(), sizes.tolist(), strict=True)
    assert [(regions[number], *rest) for number, *rest in rows] == [
        (second, 20, 9064, 30), (second, 500, 9094, 60), (first, 10, 7064, 100), (second, 0, 7164, 20),
        (headers, 120, 9000, 64), (headers, 0, 7000, 64),
    ]  # fmt: skip
    assert items.owners.tolist() == [0, 0, 1, 1, 0, 1]
    assert items.first == 4


def test_mistakes_are_refused(client: StoreClient, namespace: str) -> None:
    region, other = client.allocate(100), client.allocate(50)
    gone = client.allocate(100)
    gone.release()
    readable = client.engine.register(bytearray(100), writable=False)
    two = keys(2, namespace)
    for wrong in (
        (region, [0, 1], 1, [1, 2]),
        (region, [0, 1], 1, [-1, 3]),
        (region, [0, 1], 1, [2, 0, 0]),
        (region, 0, 1, [1 << 62, 1 << 62]),
        (region, [0, 1], 1, [0.5, 1.5]),
        (region, [0, 1], [1, 1, 1], 1),
        (([region, other], [0]), [0, 1], 1, 1),
        (([region, "no region"], [0, 1]), [0, 1], 1, 1),
        (([], 0), [0, 1], 1, 1),
        (gone, [0, 1], 1, 1),
        (([region, gone], [0, 0]), [0, 1], 1, 1),
        (region, [0, 1], 1, 0),  # a value is empty
    ):
        with pytest.raises(StoreArgumentError) as caught:
            client.put(namespace, two, wrong)
        assert caught.value.hint
    with pytest.raises(StoreArgumentError, match="read-only"):
        client.get_into(namespace, two, (readable, [0, 1], 1, 1))
    for outside in (
        (region, [0, 1, 2, 101], 1, [1, 3]),
        (region, [0, 1, 2, 99], [1, 1, 1, 2], [2, 2]),
        (region, [0, 1, 2, -1], 1, [3, 1]),
        (region, [0, 1, 2, 3], [1, 1, 1, 0], [3, 1]),
        (region, [0, 1, 2, 3], [1, 1, 1, (1 << 63) - 1], [3, 1]),
        (([region, other], [0, 0, 0, 1]), [0, 1, 2, 50], 1, [3, 1]),
        (([region, other], [0, 0, 0, 2]), [0, 1, 2, 3], 1, [3, 1]),
        (([region, other], [0, 0, 0, -1]), [0, 1, 2, 3], 1, [3, 1]),
    ):
        with pytest.raises(ChunkRangeError) as beyond:
            client.put(namespace, two, outside)
        assert beyond.value.item == 1
    assert not client.exists(namespace, two).any()
    readable.release()


def test_a_region_that_is_released_while_the_call_runs(
    client: StoreClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_ = key(namespace)
    kept, released = client.allocate(1000), client.allocate(1000)
    begin = client._core.start_moves

    def too_early(*args: Any) -> Any:
        released.release()
        return begin(*args)

    monkeypatch.setattr(client._core, "start_moves", too_early)
    with pytest.raises(StoreArgumentError, match="released"):
        client.put(namespace, [hash_], (([kept, released], [0, 1]), 0, 1000, 2))
    assert not client.stats()["segments_avoided"]


def test_four_buffers_are_no_spans(client: StoreClient, namespace: str) -> None:
    hashes = keys(8, namespace)
    client.put(namespace, hashes[:4], (b"a", b"b", b"c", b"d")).require()
    regions = tuple(client.allocate(10) for _ in range(4))
    client.put(namespace, hashes[4:], regions).require()
    assert list(client.get(namespace, hashes)) == [b"a", b"b", b"c", b"d", *[bytes(10)] * 4]
