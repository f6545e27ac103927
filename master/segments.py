# SPDX-License-Identifier: Apache-2.0
"""Segments that the master knows, and what may be done with each. Used from the event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from moonpool._index import ChunkIndex
from moonpool.master.clock import now_ms
from moonpool.master.errors import SegmentLostError, SegmentUnknownError
from moonpool.master.events import Entry, Events
from moonpool.master.sessions import Session
from moonpool.master.store import MetadataStore, SegmentRow
from moonpool.proto import pool_pb2 as pb

__all__ = ["Segment", "Segments"]

_log = logging.getLogger("moonpool.master")
# Reports of broken transfers say nothing so shortly after the master itself had connections cut.
_AFTER_FENCE_MS: Final = 2000


@dataclass(eq=False)
class Segment:
    """One segment.

    Attributes:
        row: what is kept of it over a restart.
        session: of its node; None: it has not come back after a restart, or is lost.
        unfenced: incarnations that may have begun to write there under an earlier master. It takes nothing new before
            all are fenced.
        held: it is of an earlier start, whose readers may hold leases on what is free there. It takes nothing new
            before they are over.
        quarantined: neither written nor offered to readers.
        gone_ms: of a disk, when its node went.
        reports: host, or session of none -> when it last reported a failure.
        reported_ms: when anybody last did.
        fence_ms: when a fence was last sent for it.
        lost_round: the round of sweeping in which it was lost.
        changing: held by who changes the row and waits for that.
        mending: held by who has the node look at its own memory.
        quarantined_ms: when it was quarantined last.
        cause: why, as somebody has reported it.
        note: of a disk: why it holds nothing, as its node has said.
    """

    row: SegmentRow
    session: Session | None = None
    unfenced: set[bytes] = field(default_factory=set)
    held: bool = False
    quarantined: bool = False
    gone_ms: int = 0
    reports: dict[str | bytes, int] = field(default_factory=dict)
    reported_ms: int = 0
    fence_ms: int = -_AFTER_FENCE_MS
    lost_round: int = -1
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)
    quarantined_ms: int = 0
    cause: str = ""
    note: str = ""

    @property
    def connected(self) -> bool:
        """Whether its node has a stream to this master now."""
        return self.session is not None and self.session.outbox is not None

    @property
    def writable(self) -> bool:
        """Whether new chunks may go there."""
        return not (self.quarantined or self.row.draining or self.unfenced or self.held)

    @property
    def state(self) -> pb.SegmentState:
        """As it is told to others."""
        if self.row.lost:
            return pb.LOST
        if self.quarantined or self.session is None:
            return pb.QUARANTINED
        return pb.DRAINING if self.row.draining else pb.ACTIVE


class Segments:
    """All segments, the index's view of them, and their rows in the store."""

    def __init__(self, index: ChunkIndex, store: MetadataStore, events: Events) -> None:
        self._index = index
        self._store = store
        self._events = events
        self.all: dict[int, Segment] = {}
        self.lost = 0
        self.quarantines = 0

    def get(self, number: int) -> Segment:
        """Return a segment that is not lost.

        Raises:
            SegmentUnknownError: there is none.
            SegmentLostError: it is lost.
        """
        segment = self.all.get(number)
        if segment is None:
            raise SegmentUnknownError(f"there is no segment {number}", hint="ListSegments has those that there are")
        if segment.row.lost:
            raise SegmentLostError(
                f"segment {number} was given up", hint="close the engine and mount memory of a new one as segment 0"
            )
        return segment

    @property
    def disks(self) -> int:
        """How many disks there are, be their nodes there or not."""
        return sum(segment.row.disk and not segment.row.lost for segment in self.all.values())

    def memory_of(self, session: Session) -> Segment | None:
        """Return the memory that a node lends."""
        return next((segment for segment in self.of(session) if not segment.row.disk), None)

    def of(self, session: Session) -> list[Segment]:
        """Return the segments of a node."""
        return [segment for segment in self.all.values() if segment.session is session]

    def figures(self, segment: Segment) -> dict[str, int]:
        """Return what the index knows of it; of one whose node has not come back, what its records say."""
        try:
            return self._index.segment_stats(segment.row.segment)
        except KeyError:  # no record names it, or its memory is on its way into the pool
            return dict.fromkeys(("used_bytes", "extents", "chunks", "largest_free_bytes"), 0)

    def any_writable(self, avoid: Collection[int]) -> bool:
        """Return whether there is memory that could take chunks if it had room."""
        return any(
            segment.session is not None and segment.writable and not segment.row.disk and number not in avoid
            for number, segment in self.all.items()
        )

    def restore(self, row: SegmentRow) -> None:
        """Take a segment of an earlier start. Its chunks can be read when its node comes back."""
        self.all[row.segment] = Segment(row, held=True)

    def drop_unknown(self) -> None:
        """After all were restored: chunks may name others, or lost ones, and nobody will come back with those."""
        self._index.drop_unknown([number for number, segment in self.all.items() if not segment.row.lost])

    def attach(self, segment: Segment, session: Session, ramp_up_ms: int, now_ms: int) -> None:
        """Its node is there: chunks in it can be read, and written unless somebody of before may be at it.

        Raises:
            ValueError, MemoryError: the index does not take it.
        """
        row = segment.row
        # First: when the index refuses it, nothing has changed.
        memory = self.memory_of(session) if row.disk else None
        above = None if memory is None else memory.row.segment
        self._index.add_segment(row.segment, row.capacity_bytes, session.host, ramp_up_ms, now_ms, disk_of=above)
        segment.session = session
        self.apply(segment)
        self.tell(segment)

    def leases_over(self) -> bool:
        """No lease of an earlier start runs any more. Returns whether a segment that is there has waited for that."""
        held = [segment for segment in self.all.values() if segment.held and segment.session is not None]
        for segment in held:
            segment.held = False
            self.apply(segment)
        return bool(held)

    def apply(self, segment: Segment) -> None:
        """Tell the index what may be done with a segment."""
        self._index.set_segment(segment.row.segment, writable=segment.writable, readable=not segment.quarantined)

    def tell(self, segment: Segment) -> None:
        """Tell those who watch."""
        self._events.add(Entry(pb.Event.SEGMENT, segment=segment.row.segment, state=segment.state))

    def lose(self, segment: Segment, why: str, sweep_round: int) -> None:
        """Its node is gone. What waited for a fence there waits no more: the space is given to nobody again."""
        number = segment.row.segment
        _log.warning("segment %d of node %r is lost: %s", number, segment.row.node, why)
        segment.row = dataclasses.replace(segment.row, lost=True)
        segment.session = None
        segment.unfenced.clear()
        segment.lost_round = sweep_round
        self.lost += 1
        # Not waited for: when it is not kept, a later master gives the segment up because nobody mounts it.
        self._store.put_segment(segment.row)
        # The index knows of a segment that was not mounted only when it has a chunk there.
        with contextlib.suppress(KeyError):
            self._index.drop_segment(number)
        self.tell(segment)

    def detach(self, segment: Segment, why: str) -> None:
        """The node of a disk is gone, or another process of it has the disk. What is on it is there when it is back."""
        _log.info("disk %d of node %r is away: %s", segment.row.segment, segment.row.node, why)
        segment.session = None
        segment.quarantined = False
        segment.gone_ms = now_ms()
        self._index.set_segment(segment.row.segment, writable=False, readable=False)
        self.tell(segment)

    def report(self, segment: Segment, reporter: Session, cause: str, window_ms: int) -> bool:
        """Note that somebody met a failure there, and quarantine it if there are two, or the node is away.

        Two clients of one host count as one: they have the same NIC. Returns whether there is nothing left to find out.
        Of a disk only its own node knows anything, and it is believed.
        """
        if segment.session is None:
            return True
        if segment.row.disk:
            if segment.session is reporter:
                segment.cause = cause
                self.quarantine(segment)
            return True
        now = now_ms()
        if now - segment.fence_ms >= _AFTER_FENCE_MS:
            segment.reports = {who: when for who, when in segment.reports.items() if now - when <= window_ms}
            segment.reports[reporter.host_id or reporter.id] = segment.reported_ms = now
            segment.cause = cause
            if len(segment.reports) >= 2 or not segment.connected:
                self.quarantine(segment)
        return segment.quarantined

    def quiet(self, quiet_ms: int, now_ms: int, silent_ms: int) -> list[Segment]:
        """Return the quarantined segments whose node is there and that nobody has reported for a while."""
        return [
            segment
            for segment in self.all.values()
            if segment.quarantined
            and not segment.row.disk  # its node mounts it again when it works
            and (node := segment.session) is not None
            and node.outbox is not None
            and now_ms - segment.reported_ms >= quiet_ms
            and now_ms - node.seen_ms <= silent_ms
        ]

    def quarantine(self, segment: Segment) -> None:
        """Have it neither written nor offered to readers."""
        if not segment.quarantined:
            self.quarantines += 1
            segment.quarantined_ms = now_ms()
            self._quarantine(segment, True)

    def readmit(self, segment: Segment) -> None:
        """Use it again."""
        segment.reports.clear()
        self._quarantine(segment, False)

    def _quarantine(self, segment: Segment, quarantined: bool) -> None:
        segment.quarantined = quarantined
        _log.warning(
            "segment %d of node %r is %s",
            segment.row.segment,
            segment.row.node,
            "quarantined" if quarantined else "back",
        )
        self.apply(segment)
        self.tell(segment)
