# SPDX-License-Identifier: Apache-2.0
"""Fencing: before space of a write that was given up is handed out again, its node cuts off the writer.

A fence ends what the writer had begun. It may connect again, so what it could begin afterwards has to be impossible for
other reasons: it knows that it gave the write up, or the time in which it may begin is over (`begin_ms`).
Used from the event loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from moonpool._index import ChunkIndex
from moonpool.master.packed import pairs
from moonpool.master.segments import Segment, Segments
from moonpool.master.sessions import Session, Sessions
from moonpool.proto import pool_pb2 as pb

__all__ = ["Fences"]

_log = logging.getLogger("moonpool.master")
# Fences that a node has yet to answer. The rest waits here.
_OUTSTANDING_MAX: Final = 256
# A fence takes milliseconds. Asking twice does no harm.
_AGAIN_MS: Final = 2000


@dataclass(eq=False)
class _Fence:
    number: int
    node: Session
    incarnation: bytes
    #: What it is for: owner and segment, with the owner's `given_up` when it was sent.
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    #: Segments that were mounted again, which this incarnation may write into for all that is known.
    segments: set[int] = field(default_factory=set)
    #: In which round of work it was made. What comes up later needs a later fence.
    round: int = 0
    sent_ms: int = 0


class Fences:
    """Every fence that is asked for and not answered.

    Args:
        index: whose extents wait.
        sessions: the writers.
        segments: where.
        freed: called when space was freed.
    """

    def __init__(self, index: ChunkIndex, sessions: Sessions, segments: Segments, freed: Callable[[], None]) -> None:
        self._index = index
        self._sessions = sessions
        self._segments = segments
        self._freed = freed
        self._number = 0
        self._round = 0
        self._waiting: dict[int, _Fence] = {}
        self._by_target: dict[tuple[bytes, bytes], _Fence] = {}
        #: Writers of earlier starts may begin to write until then.
        self.old_begin_until_ms = 0
        self.sent = 0
        self.done_count = 0
        self.freed_bytes = 0

    @property
    def outstanding(self) -> int:
        """Fences that nodes have yet to answer."""
        return len(self._waiting)

    def work(self, now_ms: int) -> set[int]:
        """Ask for what has to be fenced. Returns the owners of whom something waits."""
        self._round += 1
        waiting = self._ask_for_writers(now_ms)
        if now_ms >= self.old_begin_until_ms:
            self._ask_for_old_writers(now_ms)
        for fence in list(self._waiting.values()):
            if fence.node.ended:
                self._drop(fence)
            elif now_ms - fence.sent_ms >= _AGAIN_MS:
                self._send(fence, now_ms)
        return waiting

    def _ask_for_writers(self, now_ms: int) -> set[int]:
        owners = set()
        for owner, number in pairs(self._index.to_fence()):
            owners.add(owner)
            segment, writer = self._segments.all.get(number), self._sessions.by_owner.get(owner)
            if segment is None or segment.row.lost or writer is None:
                # Nobody is given space there again.
                self._free(owner, number)
            elif segment.session is not None and not (writer.ended and now_ms < writer.begin_until_ms):
                self._ask(segment, writer, now_ms)
        return owners

    def _ask(self, segment: Segment, writer: Session, now_ms: int) -> None:
        fence = self._fence(segment, writer.incarnation, now_ms)
        if fence is not None and fence.round == self._round:
            fence.pairs[writer.owner, segment.row.segment] = writer.given_up

    def _ask_for_old_writers(self, now_ms: int) -> None:
        for segment in self._segments.all.values():
            if segment.session is None:
                continue
            for incarnation in list(segment.unfenced):
                fence = self._fence(segment, incarnation, now_ms)
                if fence is None:
                    break
                if fence.round == self._round:
                    fence.segments.add(segment.row.segment)

    def _fence(self, segment: Segment, incarnation: bytes, now_ms: int) -> _Fence | None:
        """Return the fence for an incarnation at a node: a new one, or one that is under way; None: too many are."""
        node = segment.session
        assert node is not None
        fence = self._by_target.get((node.id, incarnation))
        if fence is not None and fence.node is node:
            return fence
        if len(self._waiting) >= _OUTSTANDING_MAX:
            return None
        self._number += 1
        fence = _Fence(self._number, node, incarnation, round=self._round)
        self._waiting[fence.number] = self._by_target[node.id, incarnation] = fence
        self._send(fence, now_ms)
        return fence

    def _send(self, fence: _Fence, now_ms: int) -> None:
        fence.sent_ms = now_ms
        for segment in self._segments.of(fence.node):
            segment.fence_ms = now_ms
        if fence.node.outbox is not None:
            self.sent += 1
            fence.node.outbox.put(fence=pb.Fence(fence=fence.number, incarnation=fence.incarnation))

    def resend(self, node: Session, now_ms: int) -> None:
        """The node has a new stream: what it has not answered is asked again."""
        for fence in self._waiting.values():
            if fence.node is node:
                self._send(fence, now_ms)

    def done(self, node: Session, number: int) -> None:
        """A node has answered. An answer that nobody waits for is nothing new: it was asked twice."""
        fence = self._waiting.get(number)
        if fence is None or fence.node is not node:
            return
        self._drop(fence)
        self.done_count += 1
        for (owner, segment), given_up in fence.pairs.items():
            writer = self._sessions.by_owner.get(owner)
            # What was given up after the fence was asked for may have been begun after it; that takes another one.
            if writer is None or writer.given_up == given_up:
                self._free(owner, segment)
        for segment_number in fence.segments:
            segment_ = self._segments.all.get(segment_number)
            if segment_ is not None and not segment_.row.lost:
                self._old_writer_fenced(segment_, fence.incarnation)

    def _old_writer_fenced(self, segment: Segment, incarnation: bytes) -> None:
        segment.unfenced.discard(incarnation)
        if not segment.unfenced:
            _log.info("segment %d takes chunks again: every earlier writer is fenced", segment.row.segment)
            self._segments.apply(segment)
            self._freed()

    def _free(self, owner: int, segment: int) -> None:
        self.freed_bytes += self._index.fenced(owner, segment)
        self._freed()

    def _drop(self, fence: _Fence) -> None:
        del self._waiting[fence.number]
        if self._by_target.get((fence.node.id, fence.incarnation)) is fence:
            del self._by_target[fence.node.id, fence.incarnation]
