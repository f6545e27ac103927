# SPDX-License-Identifier: Apache-2.0
"""What the index refuses to take, and how much memory it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from index.calls import MIB, OWNER, POLICIES, SPACE, names, put
from index.packing import (
    u32s,
    u64s,
)

from moonpool._index import EXTENT_BYTES, HASH_BYTES, HEADER_BYTES, NO_SEGMENT, ChunkIndex


class TestArguments:
    @pytest.mark.parametrize(
        "call",
        [
            lambda index: index.exists(SPACE, b"short"),
            lambda index: index.exists(-1, b""),
            lambda index: index.exists(2**32, b""),
            lambda index: index.match_prefix(SPACE, b"", 0, -1),
            lambda index: index.commit(OWNER, SPACE, names(2), u64s([1]), 0, b""),
            lambda index: index.commit(OWNER, SPACE, names(2), u64s([1, 2]), 0, b"\xff"),
            lambda index: index.start(OWNER, SPACE, names(3), names(2), u64s([1]), 0, 1, 1, [], 0, 0, 0),
            lambda index: index.start(OWNER, SPACE, names(3), b"", u64s([1, 1]), 0, 1, 1, [], 0, 0, 0),
            lambda index: index.start(OWNER, SPACE, names(3), b"", u64s([1]), 0, 0, 1, [], 0, 0, 0),
            lambda index: index.start(OWNER, SPACE, names(3), b"", u64s([1]), 0, 1, 9, [], 0, 0, 0),
            lambda index: index.publish(b"123"),
            lambda index: index.restore(u32s([0]), b""),
            lambda index: index.restore(b"", b"1"),
            lambda index: index.add_segment(NO_SEGMENT, MIB, 1, 0, 0),
            lambda index: index.add_segment(9, 63, 1, 0, 0),
            lambda index: index.add_segment(9, 2**60, 1, 0, 0),
            lambda index: index.remove(SPACE, names(2), u64s([1])),
            lambda index: index.remove_prefix(SPACE, b""),
            lambda index: index.evict(1, 0, generations=bytes(15)),
            lambda index: index.evict(1, 0, hashes=b"short"),
        ],
    )
    def test_a_wrong_size_is_a_value_error(self, index: ChunkIndex, call: Callable[[ChunkIndex], object]) -> None:
        with pytest.raises(ValueError, match=r"must|as many"):
            call(index)
        assert index.stats()["chunks"] == 0

    def test_a_wrong_type_is_a_type_error(self, index: ChunkIndex) -> None:
        for wrong in (None, "text", bytearray(32), 5):
            with pytest.raises(TypeError):
                index.exists(SPACE, wrong)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                index.exists(b"7", b"")  # type: ignore[arg-type]

    def test_settings_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match="prefix, s3fifo, lru"):
            ChunkIndex(policy="best")
        for wrong in ({"chunks_max": 0}, {"epoch": 2**24}, {"seed": -1}):
            with pytest.raises(ValueError, match="must be"):
                ChunkIndex(**wrong)  # type: ignore[arg-type]

    def test_segments_that_are_not_there(self, index: ChunkIndex) -> None:
        for call in (index.drop_segment, index.segment_stats):
            with pytest.raises(KeyError):
                call(77)
        with pytest.raises(KeyError):
            index.set_segment(77, writable=True, readable=True)
        assert index.fenced(OWNER, 77) == 0

    def test_the_sizes_are_those_of_the_protocol(self) -> None:
        assert (HASH_BYTES, EXTENT_BYTES, HEADER_BYTES, NO_SEGMENT) == (32, 32, 64, 0xFFFFFFFF)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_takes_at_most_200_bytes_and_gives_them_back(policy: str) -> None:
    count, batch = 200_000, 2000
    index = ChunkIndex(policy=policy)
    index.add_segment(1, count * 128, 1, 0, 0)
    gc.collect()
    before = resident_bytes()
    for first in range(0, count, batch):
        put(index, b"".join(number.to_bytes(32, "little") for number in range(first, first + batch)), length=64)
    gc.collect()
    assert index.stats()["memory_bytes"] / count < 200
    # Around it are the tests themselves, so this is no more than a plausibility check.
    assert (resident_bytes() - before) / count < 260
    for first in range(0, count, batch):
        hashes = b"".join(number.to_bytes(32, "little") for number in range(first, first + batch))
        index.reclaim(index.remove(SPACE, hashes)[1], 0)
    assert index.stats()["memory_bytes"] < count * 20
    assert index.check() == ""
