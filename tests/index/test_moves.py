# SPDX-License-Identifier: Apache-2.0
"""Moves of replicas between segments, in the form that the master calls them. The state machine does the rest."""

from __future__ import annotations

import pytest
from index.calls import MIB, SPACE, exist, names, put
from index.model_parts import Status
from index.packing import statuses_of, u32s, u64s, unpack_moves, unpack_records, unpack_u32s

from moonpool._index import MOVE_BYTES, NO_SEGMENT, ChunkIndex

ALL = (1 << 20, 1 << 20, 1 << 40, 1 << 40)


def numbers(moves: bytes) -> bytes:
    return b"".join(moves[at : at + 8] for at in range(0, len(moves), MOVE_BYTES))


def test_a_round_goes_on_where_it_ended(index: ChunkIndex) -> None:
    hashes = names(20)
    put(index, hashes, avoid=(2,))
    seen, following = set(), 0
    for _ in range(7):
        moves, following, no_room = index.move_out(1, following, 1000, 3, 1 << 40, 1 << 40, [], 0)
        assert no_room == 0
        seen |= {move[8] for move in unpack_moves(moves)}
    assert following == NO_SEGMENT
    assert len(seen) == 20
    assert index.move_out(1, 0, *ALL, [], 0) == (b"", NO_SEGMENT, 0)
    assert index.stats()["moving"] == 20


def test_what_is_durable_has_happened_after_a_restart(index: ChunkIndex) -> None:
    hashes = names(4)
    rows = put(index, hashes, avoid=(2,))
    moves, _, _ = index.move_out(1, 0, *ALL, [], 0)
    done, left = numbers(moves)[:16], numbers(moves)[16:]
    statuses, slots, records = index.commit_moves(done)
    assert statuses == bytes(2)
    rows.update(zip(unpack_u32s(slots), unpack_records(records), strict=True))
    assert len(left) == 16

    after = ChunkIndex(epoch=4)
    packed = b"".join(len(row).to_bytes(4, "little") + row for row in rows.values())
    assert after.restore(u32s(rows), packed) == 4
    for segment in (1, 2):
        after.add_segment(segment, MIB, segment, 0, 0)
        assert after.segment_stats(segment)["extents"] == 2
    assert exist(after, hashes) == [True] * 4
    # It knows nothing of moves of before.
    assert after.commit_moves(left) == (bytes([Status.NOT_FOUND] * 2), b"", b"")
    assert after.publish_moves(done, 0) == after.abort_moves(left) == 0


def test_a_chunk_can_be_sent_to_a_segment(index: ChunkIndex) -> None:
    hashes = names(3)
    put(index, hashes, avoid=(2,))
    statuses, moves = index.move_to(SPACE, hashes + names(1, "other"), 2, 2, 1 << 40)
    assert statuses_of(statuses) == [Status.OK, Status.OK, Status.WRITING, Status.NOT_FOUND]
    assert [(move[1], move[2]) for move in unpack_moves(moves)] == [(1, 2)] * 2
    index.commit_moves(numbers(moves))
    assert index.publish_moves(numbers(moves), 0) == 2 * 1088
    statuses, moves = index.move_to(SPACE, hashes, 2, 9, 1 << 40)
    assert statuses_of(statuses) == [Status.ALREADY, Status.ALREADY, Status.OK]
    assert index.abort_moves(numbers(moves)) == 1088
    index.add_segment(3, 1024, 3, 0, 0)
    index.set_segment(2, writable=False, readable=True)
    assert statuses_of(index.move_to(SPACE, hashes, 3, 9, 1 << 40)[0]) == [Status.TOO_LARGE] * 3
    assert statuses_of(index.move_to(SPACE, hashes[64:], 2, 9, 1 << 40)[0]) == [Status.NO_SPACE]


def test_wrong_arguments_change_nothing(index: ChunkIndex) -> None:
    put(index, names(1), avoid=(2,))
    with pytest.raises(KeyError):
        index.move_out(9, 0, *ALL, [], 0)
    with pytest.raises(KeyError):
        index.move_to(SPACE, names(1), 9, 1, 1)
    for call in (index.commit_moves, index.abort_moves, lambda moves: index.publish_moves(moves, 0)):
        with pytest.raises(ValueError, match="multiple of 8"):
            call(b"1234567")
        with pytest.raises(TypeError):
            call(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        index.move_out(1, 0, *ALL, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32"):
        index.move_to(SPACE, b"short", 2, 1, 1)
    assert index.commit_moves(u64s([1, 2, 3]))[0] == bytes([Status.NOT_FOUND] * 3)
    assert index.stats()["moving"] == 0
    assert index.check() == ""
