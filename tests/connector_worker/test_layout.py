# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a chunk lie: compared with a slow second opinion, for every layout that vLLM has."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_testing import HAS_TORCH, ArrayTensor, Cache

from moonpool.connector.layout import SEAL_BYTES, Area, CacheLayoutError, PagedCache, _inner_order
from moonpool.transfer_engine import TransferEngine

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with TransferEngine("paged", listen=None) as engine:
        yield engine


def paged(engine: TransferEngine, cache: Cache, chunk_blocks: int, views: dict[str, Any] | None = None) -> PagedCache:
    return PagedCache(engine, views or cache.views(), cache.blocks, chunk_blocks, cache.layout)


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    layout = draw(st.sampled_from(LAYOUTS))
    split = draw(st.sampled_from([1, 2, 4])) if layout in ("LBHNC", "LBNHC") else 1
    return Cache(
        layout=layout,
        layers=draw(st.integers(1, 4)),
        blocks=draw(st.integers(1, 9)),
        heads=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 4)),
        content=draw(st.integers(1, 5)),
        split=split,
        padding=2 * draw(st.integers(0, 3)),
        with_torch=draw(st.sampled_from([True, False] if HAS_TORCH else [False])),
    )


def read(source: PagedCache, blocks: list[int]) -> list[bytes]:
    """The bytes of the chunks in these blocks, as the spans say."""
    (regions, which), offsets, lengths, counts = source.values(source.table(blocks))
    spans = iter(zip(which.tolist(), offsets.tolist(), lengths.tolist(), strict=True))
    return [
        b"".join(
            bytes(memoryview(regions[one])[at : at + length]) for one, at, length in itertools.islice(spans, count)
        )
        for count in counts.tolist()
    ]


def without_seal(chunk: bytes) -> bytes:
    return chunk[:-SEAL_BYTES]


@given(st.data(), caches(), st.integers(1, 4))
def test_spans_are_the_second_opinion_and_scatter_writes_to_them(
    engine: TransferEngine, data: st.DataObject, cache: Cache, chunk_blocks: int
) -> None:
    cache.fill(1)
    before = cache.storage.copy()
    blocks = data.draw(st.permutations(range(cache.blocks)))[: cache.blocks // chunk_blocks * chunk_blocks]
    source = paged(engine, cache, chunk_blocks)
    chunks = read(source, blocks)
    assert source.chunk_bytes * len(chunks) == sum(map(len, chunks))
    tokens_first = cache.layout in ("LBNHC", "BLNHC")
    for number, chunk in enumerate(chunks):
        own = blocks[number * chunk_blocks : (number + 1) * chunk_blocks]
        assert without_seal(chunk) == cache.chunk(own, tokens_first=tokens_first)

    # Into other blocks, of which the first and the last chunk have only some.
    begin = data.draw(st.integers(0, chunk_blocks - 1))
    end = data.draw(st.integers(min(begin, len(blocks)), len(blocks)))
    targets = data.draw(st.permutations(range(cache.blocks)))[: max(0, end - begin)]
    table = source.table(targets, begin if targets else 0)
    staging = engine.register(bytearray(b"".join(chunks) + b"."))
    source.scatter(table, staging, np.arange(len(table)) * source.chunk_bytes)
    old = dataclasses.replace(cache)
    old.storage[:] = before
    moved = dict(zip(targets, blocks[begin:], strict=False))
    for layer in range(cache.layers):
        for block in range(cache.blocks):
            came_from = moved.get(block, block)
            now = cache.array(layer)[block * cache.split : (block + 1) * cache.split]
            then = old.array(layer)[came_from * cache.split : (came_from + 1) * cache.split]
            assert (now == then).all()
    assert (cache.storage[: cache.padding] == before[: cache.padding]).all()
    staging.release()
    source.release()


def test_a_chunk_of_which_only_a_part_goes_is_in_the_area(engine: TransferEngine) -> None:
    cache = Cache()
    source = paged(engine, cache, 4)
    area = Area(engine.allocate(64 + source.area_bytes(3)), 64)
    table = source.table([7, 6, 5, 4, 3, 2, 1, 0, 2], begin_block=3)
    assert table.tolist() == [[-1, -1, -1, 7], [6, 5, 4, 3], [2, 1, 0, 2]]
    (regions, which), offsets, lengths, counts = source.destinations(table, area)
    (_, in_cache), *_ = whole = source.values(table[1:])
    assert regions == [*source.regions, area.region]
    assert counts.tolist() == [1, 13, 13]
    assert which.tolist() == [1, *in_cache.tolist()]
    seals = 64 + source.chunk_bytes
    expected = [64, *whole[1].tolist()]
    expected[13], expected[26] = seals + SEAL_BYTES, seals + 2 * SEAL_BYTES
    assert offsets.tolist() == expected
    assert lengths.tolist() == [source.chunk_bytes, *whole[2].tolist()]
    assert not source.sealed(table, area).any()
    memory, seal = memoryview(area.region).cast("B"), read(source, [0, 1, 2, 3])[0][-SEAL_BYTES:]
    memory[seals - SEAL_BYTES : seals] = seal
    memory[seals + 2 * SEAL_BYTES : seals + 3 * SEAL_BYTES] = seal
    assert source.sealed(table, area).tolist() == [True, False, True]
    area.region.release()


def test_the_seal_says_what_only_a_worker_knows(engine: TransferEngine) -> None:
    def seal(cache: Cache) -> bytes:
        return read(paged(engine, cache, 1), [0])[0][-SEAL_BYTES:]

    assert seal(Cache()) == seal(Cache("LHBNC")) == seal(Cache(blocks=9, padding=4))
    others = [Cache(), Cache("LBNHC"), Cache(layers=2), Cache(tokens=2, split=2), Cache(heads=4, tokens=2)]
    assert len({seal(cache) for cache in others}) == len(others)


def test_caches_that_lie_differently_have_the_same_chunks(engine: TransferEngine) -> None:
    values = np.arange(3 * 8 * 2 * 4 * 6, dtype=np.uint16).reshape(3, 8, 2, 4, 6)
    found = set()
    for layout in ("LBHNC", "LHBNC", "BLHNC", "BHLNC"):
        cache = Cache(layout=layout)
        for layer in range(3):
            cache.array(layer)[:] = values[layer]
        source = paged(engine, cache, 2)
        found.update(read(source, [5, 2]))
    assert len(found) == 1
    assert (
        {_inner_order(layout) for layout in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")}
        == {_inner_order(None)}
        != {_inner_order("LBNHC")}
    )


def test_a_layer_is_one_range_of_a_chunk_in_natural_order(engine: TransferEngine) -> None:
    cache = Cache(layers=12, blocks=2).fill(2)
    source = paged(engine, cache, 1)
    (chunk,) = read(source, [1])
    layer_bytes = (source.chunk_bytes - SEAL_BYTES) // 12
    for layer in (2, 10, 11):
        assert chunk[layer * layer_bytes : (layer + 1) * layer_bytes] == cache.array(layer)[1].tobytes()


def test_a_layer_that_shares_the_cache_of_another_is_stored_once(engine: TransferEngine) -> None:
    cache = Cache()
    views = cache.views()
    views["model.layers.9.attn"] = views["model.layers.1.attn"]
    assert paged(engine, cache, 1, views).chunk_bytes == paged(engine, cache, 1).chunk_bytes


def test_each_storage_is_registered_once(engine: TransferEngine) -> None:
    first, second = Cache(), Cache().fill(3)
    views = first.views() | {name.replace("layers", "more"): view for name, view in second.views().items()}
    source = paged(engine, first, 2, views)
    assert len(source.regions) == 2
    assert without_seal(read(source, [3, 1])[0]) == first.chunk([3, 1]) + second.chunk([3, 1])


def test_what_it_does_not_know_is_refused(engine: TransferEngine) -> None:
    cache = Cache(with_torch=False)
    view = cache.views()["model.layers.0.attn"]

    def refusal(views: dict[str, Any], num_blocks: int = cache.blocks) -> str:
        regions = engine.stats()["regions"]
        with pytest.raises(CacheLayoutError) as refused:
            PagedCache(engine, views, num_blocks, 1, None)
        assert engine.stats()["regions"] == regions
        return str(refused.value)

    assert "Mamba" in refusal({"a": [view, view]})
    assert "no layers" in refusal({})
    assert "[blocks, heads, tokens, content]" in refusal({"a": ArrayTensor(view.array[0], cache.storage)})
    assert "for 5 blocks" in refusal({"a": view}, 5)
    on_device = ArrayTensor(view.array, cache.storage)
    on_device.device = types.SimpleNamespace(type="xpu")
    assert "device" in refusal({"a": on_device})
    # Two layers of different shape over the same bytes, as those of hybrid models are.
    assert "share memory" in refusal({"a": view, "b": ArrayTensor(view.array[:, :1], cache.storage)})
    assert "share memory" in refusal({"a": ArrayTensor(np.lib.stride_tricks.as_strided(
        view.array, view.shape, (2, *view.array.strides[1:])), cache.storage)})  # fmt: skip
    assert "end at" in refusal({"a": ArrayTensor(view.array, cache.storage[:64])})


def test_blocks_that_are_not_there_are_a_fault_of_the_plan(engine: TransferEngine) -> None:
    source = paged(engine, Cache(), 2)
    for blocks in ([0, 8], [-1, 0]):
        with pytest.raises(IndexError):
            source.table(blocks)
