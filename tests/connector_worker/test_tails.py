# SPDX-License-Identifier: Apache-2.0
"""The end of a prompt that is handed over: a chunk of fewer blocks, saved and loaded by itself or behind whole ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from store_testing import keys
from worker_testing import Cache
from worker_testing.rig import Rig

from moonpool.connector.layout import PagedCache

BLOCKS = 4
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BHLNC"]


Rigs = Callable[..., Rig]


def made(rigs: Rigs, layout: str = "LBHNC") -> Rig:
    return rigs(cache=Cache(layout=layout, blocks=32, heads=2, tokens=16, content=64), chunk_blocks=BLOCKS)


def hand_over(rig: Rig, whole: int, tail: int, to: list[int], begin: int = 0) -> None:
    """Save chunks and a tail that lie in the first blocks, and load them without their first `begin` blocks."""
    rig.cache.fill(10 * whole + tail)
    hashes = keys(whole + 1)
    source = list(range(whole * BLOCKS + tail))
    if whole:
        rig.save(hashes[:whole], source[: whole * BLOCKS])
    rig.save(hashes[whole:], source[whole * BLOCKS :], hashes[whole - 1] if whole else bytes(32), tail_blocks=tail)
    assert all(save.saved for save in rig.saved(1 + bool(whole)).values())
    there = [rig.cache.chunk([block]) for block in source]
    others = sorted(set(range(rig.cache.blocks)) - set(to))
    before = [rig.cache.chunk([block]) for block in others]
    first = begin // BLOCKS
    load = rig.load(hashes[first:], to, begin_block=begin % BLOCKS, tail_blocks=tail)
    rig.loaded()
    assert (load.good, load.failed_blocks) == (whole + 1 - first, [])
    assert [rig.cache.chunk([block]) for block in to] == there[begin : begin + len(to)]
    assert [rig.cache.chunk([block]) for block in others] == before, "blocks of others have changed"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tail", range(1, BLOCKS))
@pytest.mark.parametrize("whole", [0, 1, 2])
def test_a_tail_of_any_length_comes_back(rigs: Rigs, whole: int, tail: int, layout: str) -> None:
    rig = made(rigs, layout)
    count = whole * BLOCKS + tail
    hand_over(rig, whole, tail, list(range(31, 31 - count, -1)))


@pytest.mark.parametrize(("begin", "end"), [(0, 10), (1, 11), (5, 11), (8, 11), (9, 11), (9, 10), (8, 10)])
def test_a_part_of_what_comes_before_or_at_its_end_is_left_out(rigs: Rigs, begin: int, end: int) -> None:
    rig = made(rigs)
    hand_over(rig, 2, 3, list(range(31, 31 - (end - begin), -1)), begin)


def test_a_tail_of_another_length_or_that_is_missing_fails_by_itself(rigs: Rigs) -> None:
    rig = made(rigs)
    rig.cache.fill(1)
    hashes = keys(3)
    rig.save(hashes[:1], range(4))
    rig.save(hashes[1:2], range(4, 6), hashes[0], tail_blocks=2)
    rig.saved(2)
    for key, tail in ((hashes[1], 3), (hashes[2], 2)):
        load = rig.load([hashes[0], key], range(20, 24 + tail), tail_blocks=tail)
        rig.loaded()
        assert (load.good, load.failed_blocks) == (1, list(range(24, 24 + tail)))


def test_shorter_chunks_of_a_cache_are_those_of_one_that_is_made_for_them(rigs: Rigs) -> None:
    rig = made(rigs)
    own = PagedCache(rig.engine, rig.cache.views(), rig.cache.blocks, 3, rig.cache.layout)
    shorter = rig.paged.of(3)
    assert shorter is rig.paged.of(3)
    assert rig.paged.of(0) is rig.paged.of(BLOCKS) is rig.paged
    assert (shorter.chunk_bytes, shorter.layer_bytes) == (own.chunk_bytes, own.layer_bytes)
    table = own.table([5, 2, 9])
    for here, there in zip(shorter.values(table)[1:], own.values(table)[1:], strict=True):
        assert np.array_equal(here, there)
    own.release()
