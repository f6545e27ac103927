# SPDX-License-Identifier: Apache-2.0
"""The calls about sessions and segments."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from moonpool.master.copies import Move
from moonpool.master.core import Core, now_ms
from moonpool.master.errors import (
    InvalidRequestError,
    LimitError,
    SegmentLostError,
    SessionUnknownError,
    StoreUnavailableError,
)
from moonpool.master.packed import count_of
from moonpool.master.segments import Segment
from moonpool.master.sessions import ID_BYTES, PINS_MAX, Outbox, Session, check_hello
from moonpool.master.store import SegmentRow
from moonpool.proto import pool_pb2 as pb

__all__ = ["MembershipCalls"]

_log = logging.getLogger("moonpool.master")
_TEXT_MAX: Final = 1024
_CAPACITY_MAX: Final = 1 << 46
# What the smallest extent takes.
_CAPACITY_MIN: Final = 64


class MembershipCalls:
    """Heartbeats, and the segments of nodes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.settings
        self._timeout = settings.session_timeout
        self._interval_ms = round(settings.heartbeat_interval * 1000)
        self._beat = pb.HeartbeatReply(header=core.header)

    # ---------------------------------------------------------------- sessions

    async def Heartbeat(self, requests: AsyncIterator[pb.HeartbeatRequest]) -> AsyncIterator[pb.HeartbeatReply]:
        """Hold a session for as long as messages come."""
        self._core.check_open()
        try:
            first = await asyncio.wait_for(anext(requests), self._timeout)
        except StopAsyncIteration:
            return
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise InvalidRequestError("no Hello came", hint="Hello is the first message") from None
        if first.WhichOneof("kind") != "hello":
            raise InvalidRequestError("the first message is no Hello", hint="Hello is the first message")
        session = await self._enter(first.hello)
        outbox = session.outbox
        assert outbox is not None
        try:
            yield self._welcome(session, await self._name(session, first.hello, requests))
            async for reply in self._converse(session, outbox, requests):
                yield reply
        finally:
            # It may come back over another stream; its timeout runs from the last message.
            if session.outbox is outbox:
                session.outbox = None

    async def _enter(self, hello: pb.Hello) -> Session:
        core = self._core
        check_hello(hello)
        session = core.sessions.alive.get(hello.session)
        if session is not None and (session.incarnation, session.kind) != (hello.incarnation, hello.kind):
            raise InvalidRequestError("this session has another incarnation or kind", hint="a new session id")
        if session is None:
            session = core.sessions.new(hello, core.host(hello.host_id), now_ms())
        # Who only reads needs no row, and so no disk. One that has a row, or holds what needs one, keeps it.
        if session.kind == pb.CLIENT and (hello.pins or hello.more_pins or hello.session in core.old_writers):
            try:
                await core.keep_writer(session)
            except StoreUnavailableError:
                core.end_session(session, "it could not be made durable")
                raise
        session.roster, session.entry = hello.roster, hello.entry
        session.seen_ms = now_ms()
        if session.outbox is not None:
            session.outbox.close()
        session.outbox = Outbox()
        core.fences.resend(session, now_ms())
        return session

    async def _name(self, session: Session, hello: pb.Hello, requests: AsyncIterator[pb.HeartbeatRequest]) -> set[int]:
        """Pin again what it held with a master that this one follows. Returns pins that miss chunks."""
        lost: set[int] = set()
        known, outbox = session.named, session.outbox
        if not known:
            # Of a stream that ended in the middle of it. All of it comes again.
            for pin in session.naming:
                session.pins.pop(pin, None)
                self._core.index.unpin(session.owner, pin)
            session.naming.clear()
            self._hold(session, hello.pins, lost)
        more = hello.more_pins
        while more:
            try:
                holding = (await asyncio.wait_for(anext(requests), self._timeout)).holding
            except (StopAsyncIteration, TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                raise InvalidRequestError("not all pins came", hint="Holding, up to the last") from None
            if session.ended or session.outbox is not outbox:
                raise SessionUnknownError("the session ended, or has another stream", retryable=True, hint="say Hello")
            session.seen_ms = now_ms()
            if not known:
                self._hold(session, holding.pins, lost)
            more = not holding.last
        session.named = True
        session.naming.clear()
        self._core.heard(session.id)
        return lost

    def _hold(self, session: Session, pins: Iterable[pb.HeldPin], lost: set[int]) -> None:
        core = self._core
        for held in pins:
            # Its batch may have been larger than this master takes in one call; a message has its own bound.
            count_of(held.hashes, len(held.hashes))
            if held.pin not in session.pins and len(session.pins) >= PINS_MAX:
                raise LimitError(f"the session holds {len(session.pins)} pins", hint="fewer, of more chunks each")
            statuses = core.index.pin(session.owner, held.pin, core.namespace(held.namespace), held.hashes)
            if pinned := statuses.count(pb.OK):
                session.naming.add(held.pin)
                session.pins[held.pin] = session.pins.get(held.pin, 0) + pinned
            if pinned < len(statuses):
                lost.add(held.pin)

    def _welcome(self, session: Session, lost: set[int]) -> pb.HeartbeatReply:
        welcome = pb.Welcome(
            interval_ms=self._interval_ms,
            session_timeout_ms=round(self._timeout * 1000),
            lost_pins=sorted(lost),
            entries=self._core.sessions.entries_beside(session),
        )
        return pb.HeartbeatReply(header=self._core.header, welcome=welcome)

    async def _converse(
        self, session: Session, outbox: Outbox, requests: AsyncIterator[pb.HeartbeatRequest]
    ) -> AsyncIterator[pb.HeartbeatReply]:
        """Yield a reply to each message, and what the node is to do as it comes up, until either side ends it."""
        core = self._core
        waits: dict[str, asyncio.Task[Any]] = {}
        try:
            while not outbox.closed and not core.closing.is_set():
                for name, wait in (
                    ("read", requests.__anext__),
                    ("send", outbox.changed.wait),
                    ("end", core.closing.wait),
                ):
                    if name not in waits:
                        waits[name] = asyncio.ensure_future(wait())
                await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
                if waits["send"].done():
                    del waits["send"]
                    for order in outbox.take():
                        yield pb.HeartbeatReply(header=core.header, **order)
                if waits["read"].done():
                    try:
                        message = waits.pop("read").result()
                    except StopAsyncIteration:
                        return
                    if not self._heard(session, outbox, message):
                        return
                    yield self._beat
            core.check_open()
        finally:
            for wait_ in waits.values():
                wait_.cancel()
            await asyncio.gather(*waits.values(), return_exceptions=True)

    def _heard(self, session: Session, stream: Outbox, message: pb.HeartbeatRequest) -> bool:
        """Take a message. Returns whether the session goes on."""
        core = self._core
        if session.ended:
            return False
        session.seen_ms = now_ms()
        kind = message.WhichOneof("kind")
        if kind == "hello":
            raise InvalidRequestError("a second Hello", hint="one for each stream")
        if kind == "fence_done":
            core.fences.done(session, message.fence_done.fence)
        elif kind == "probe_done":
            core.probes.done(session, message.probe_done)
        elif kind == "copy_done":
            core.copies.answered(session, message.copy_done)
        elif kind == "copies_over":
            core.copies.over_before(session, stream)
        elif kind == "goodbye":
            core.end_session(session, "goodbye")
            return False
        return True

    # ---------------------------------------------------------------- segments

    async def MountSegment(self, request: pb.MountSegmentRequest) -> pb.MountSegmentReply:
        """Take memory of a node into the pool."""
        core = self._core
        core.check_open()
        session = core.sessions.get(request.session)
        _check_mount(session, request)
        if request.segment:
            segment = self._mount_again(session, request)
        else:
            segment = await core.to_the_end(self._mount(session, request))
        segment.note = request.note[:_TEXT_MAX]
        return pb.MountSegmentReply(header=core.header, segment=segment.row.segment)

    async def _mount(self, session: Session, request: pb.MountSegmentRequest) -> Segment:
        core = self._core
        for known in core.segments.of(session):
            if (known.row.region, known.row.incarnation) == (request.region, request.incarnation):
                _check_capacity(known, request)
                return known  # the reply was lost and it asks again
        for other in core.segments.all.values():
            if (other.row.region, other.row.incarnation) == (request.region, request.incarnation):
                raise SegmentLostError(
                    f"this memory is segment {other.row.segment} already, or was",
                    hint="mount it under its number, or memory of a new engine",
                )
        if len(core.segments.all) >= core.settings.segments_max:
            raise LimitError(f"there are {len(core.segments.all)} segments already", hint="segments_max of the master")
        _check_above(core, session, request)
        row = SegmentRow(
            core.store.new_segment(),
            session.name,
            session.host_id,
            request.address,
            request.region,
            request.incarnation,
            request.capacity_bytes,
        )
        segment = core.segments.all[row.segment] = Segment(row)
        try:
            await core.durable(core.store.put_segment(row))
            core.sessions.get(session.id)  # it may have ended meanwhile
            core.segments.attach(segment, session, round(core.settings.ramp_up * 1000), now_ms())
        except BaseException:
            del core.segments.all[row.segment]
            core.store.remove_segment(row.segment)
            raise
        core.freed()
        _log.info("segment %d: %d bytes of node %r at %s", row.segment, row.capacity_bytes, row.node, row.address)
        return segment

    def _mount_again(self, session: Session, request: pb.MountSegmentRequest) -> Segment:
        core = self._core
        segment = core.segments.all.get(request.segment)
        if segment is None or segment.row.lost or segment.row.incarnation != request.incarnation:
            raise SegmentLostError(
                f"segment {request.segment} was given up, or is not of this engine",
                hint="close the engine and mount memory of a new one as segment 0",
            )
        row = segment.row
        _check_capacity(segment, request)
        if segment.session is session:
            if row.disk and segment.quarantined:
                core.segments.readmit(segment)  # its node has found that it works
                core.freed()
            return segment
        if row.disk and segment.session is not None:
            core.detach(segment, "its node has a new session")
        _check_above(core, session, request)
        if segment.session is not None:
            # The same engine incarnation under two sessions at once: nobody can say which of them answers fences.
            raise _of_another(row.segment)
        segment.row = dataclasses.replace(row, address=request.address, node=session.name, host_id=session.host_id)
        core.store.put_segment(segment.row)
        core.mount_again(segment)
        core.segments.attach(segment, session, 0, now_ms())
        core.freed()
        _log.info("segment %d of node %r is back", row.segment, row.node)
        return segment

    def UnmountSegment(self, request: pb.UnmountSegmentRequest) -> pb.UnmountSegmentReply:
        """Give memory back to its node. Its chunks are gone."""
        core = self._core
        session = core.sessions.get(request.session)
        segment = core.segments.get(request.segment)
        if segment.session is not session:
            raise _of_another(request.segment)
        core.lose(segment, "it was unmounted")
        return pb.UnmountSegmentReply(header=core.header)

    def ReportFailure(self, request: pb.ReportFailureRequest) -> pb.ReportFailureReply:
        """Somebody could not read or write there."""
        core = self._core
        session = core.sessions.get(request.session)
        segment = core.segments.get(request.segment)
        _log.info("%r reports segment %d: %s", session.name, request.segment, request.cause[:_TEXT_MAX])
        if request.hashes:
            looks = core.mending.named(request)
            core.run(self._spoilt(segment, session, request.cause, looks))
        else:
            self._failed(segment, session, request.cause)
        return pb.ReportFailureReply(header=core.header)

    async def _spoilt(self, segment: Segment, session: Session, cause: str, looks: list[Move]) -> None:
        if await self._core.mending.finds_nothing(segment.row.segment, looks):
            self._failed(segment, session, cause)

    def _failed(self, segment: Segment, session: Session, cause: str) -> None:
        core = self._core
        if not core.segments.report(segment, session, cause[:_TEXT_MAX], round(core.settings.report_window * 1000)):
            core.probes.begin(segment, functools.partial(self._probed, segment))

    def _probed(self, segment: Segment, works: bool) -> None:
        if not works:
            self._core.segments.quarantine(segment)


def _of_another(segment: int) -> InvalidRequestError:
    return InvalidRequestError(f"segment {segment} belongs to another session", hint="the session that mounted it")


def _check_capacity(segment: Segment, request: pb.MountSegmentRequest) -> None:
    row = segment.row
    if (row.region, row.capacity_bytes) != (request.region, request.capacity_bytes):
        raise InvalidRequestError(
            f"segment {row.segment} is region {row.region!r} of {row.capacity_bytes} bytes", hint="the same memory"
        )


def _check_mount(session: Session, request: pb.MountSegmentRequest) -> None:
    if session.kind != pb.NODE:
        raise InvalidRequestError("a client lends no memory", hint="a session of kind NODE")
    if len(request.incarnation) != ID_BYTES:
        raise InvalidRequestError(f"an incarnation of {len(request.incarnation)} bytes", hint="16 bytes")
    if not _CAPACITY_MIN <= request.capacity_bytes <= _CAPACITY_MAX:
        raise InvalidRequestError(
            f"a capacity of {request.capacity_bytes} bytes", hint=f"{_CAPACITY_MIN} to {_CAPACITY_MAX}"
        )
    if not request.address or len(request.address) + len(request.region) > _TEXT_MAX:
        raise InvalidRequestError("no address, or too long", hint="that of the node's engine")
    if (request.medium == pb.DISK) != (not request.region):
        raise InvalidRequestError("memory has a region, and a disk has none", hint="the medium of the segment")


def _check_above(core: Core, session: Session, request: pb.MountSegmentRequest) -> None:
    if request.medium == pb.DISK and core.segments.memory_of(session) is None:
        raise InvalidRequestError("a disk without memory of its node", hint="mount the memory first")
