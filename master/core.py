# SPDX-License-Identifier: Apache-2.0
"""The state of a master, and the steps that its handlers and loops share. Used from the event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from moonpool._index import NO_SEGMENT, ChunkIndex
from moonpool.master.clock import granted_ms, now_ms
from moonpool.master.copies import COUNT_MAX, Copies
from moonpool.master.disks import Disks
from moonpool.master.drains import Drains
from moonpool.master.errors import (
    MasterClosedError,
    StoreDamagedError,
    StoreUnavailableError,
)
from moonpool.master.events import Entry, Events
from moonpool.master.fences import Fences
from moonpool.master.mending import Mending
from moonpool.master.metrics import Metrics
from moonpool.master.namespaces import Namespaces
from moonpool.master.probes import Probes
from moonpool.master.replays import Replays
from moonpool.master.segments import Segment, Segments
from moonpool.master.sessions import Session, Sessions
from moonpool.master.settings import MasterSettings
from moonpool.master.store import Identity, MetadataStore, Writer
from moonpool.master.supervision import Supervisor
from moonpool.proto import pool_pb2 as pb

__all__ = ["Core", "granted_ms", "now_ms"]

_log = logging.getLogger("moonpool.master")
_HOSTS_MAX: Final = 1 << 16
T = TypeVar("T")


class Core:
    """Everything that a master knows.

    Args:
        settings: of the master.
        store: opened.
        identity: what opening it returned.
        methods: names of the calls, for metrics.
    """

    def __init__(self, settings: MasterSettings, store: MetadataStore, identity: Identity, methods: list[str]) -> None:
        self.settings = settings
        self.store = store
        self.boot_id = os.urandom(16)
        self.started_ms = now_ms()
        self.header = pb.Header(cluster_id=identity.cluster_id, boot_id=self.boot_id, epoch=identity.epoch)
        self.index = ChunkIndex(
            policy=settings.policy,
            chunks_max=settings.chunks_max,
            epoch=identity.epoch,
            seed=int.from_bytes(os.urandom(8), "little"),
        )
        self.namespaces = Namespaces(self)
        self.events = Events(settings.events_max, self.namespaces.name_of)
        self.metrics = Metrics(methods)
        self.sessions = Sessions(settings.sessions_max)
        self.segments = Segments(self.index, store, self.events)
        self.fences = Fences(self.index, self.sessions, self.segments, self.freed)
        self.probes = Probes(self.segments, self.metrics)
        self.copies = Copies(self)
        self.drains = Drains(self)
        self.mending = Mending(self)
        self.disks = Disks(self)
        #: Calls of PutStart that wait for room.
        self.waiting_puts = 0
        self.supervisor = Supervisor()
        self.closing = asyncio.Event()
        self.sweep_round = 0
        #: Sessions of earlier starts whose incarnations have to be fenced where they may write.
        self.old_writers: dict[bytes, bytes] = {writer.session: writer.incarnation for writer in store.writers()}
        #: Until then readers may hold leases of an earlier start, also on what is free since, and nobody knows on what.
        self.held_until_ms = 0
        #: Sessions of an earlier start that may hold pins, and have not said what they hold. Until it is empty, or the
        #: time is over that they have for it, nothing is removed or evicted.
        self.unheard = set(self.old_writers)
        self._unheard_until_ms = 0
        self._heard = asyncio.Event()
        self.replays = Replays()
        self.restored_chunks = 0
        self._undeleted = bytearray()
        self._deleting = asyncio.Lock()
        self._unreclaimed = bytearray()
        self._unpublished: list[bytes] = []
        self._hosts: dict[str, int] = {}
        self._space = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---------------------------------------------------------------- restart

    def restore(self, page: int = 16_384) -> None:
        """Take what the store holds. Nothing is served yet, so this may take its time; it need not be the event loop.

        Raises:
            StoreDamagedError: the store cannot be read.
        """
        rows = self.store.segments()
        for row in rows:
            if row.disk and not row.lost:
                self.index.know_disk(row.segment)
        for slots, records in self.store.load(page):
            self.restored_chunks += self.index.restore(slots, records)
        if self.store.stats()["refused_writers"]:
            # Somebody may still write whom nobody can name, so nobody is given room in what there was.
            _log.warning("a writer of before is not known: segments take nothing new until their nodes start again")
            rows = [row if row.disk else dataclasses.replace(row, draining=True) for row in rows]
        for row in rows:
            self.segments.restore(row)
        self.segments.drop_unknown()
        if rows:
            self.held_until_ms = granted_ms() + round(self.settings.lease_max * 1000)
            self._unheard_until_ms = granted_ms() + round(self.settings.session_timeout * 1000)
            self.fences.old_begin_until_ms = granted_ms() + round(self.settings.put_begin * 1000)

    def mount_again(self, segment: Segment) -> None:
        """A segment of an earlier start is there again: every writer of then is fenced before it takes chunks."""
        segment.unfenced = set() if segment.row.disk else set(self.old_writers.values())

    @property
    def pins_known(self) -> bool:
        """Whether all pins of an earlier start are known, as far as they are not over."""
        return not self.unheard or now_ms() >= self._unheard_until_ms

    def heard(self, session: bytes) -> None:
        """This session has said what it holds, or is over."""
        self.unheard.discard(session)
        if not self.unheard:
            self._heard.set()

    async def wait_for_pins(self, seconds: float | None) -> bool:
        """Wait until all pins of an earlier start are known, but not longer. Returns whether they are."""
        while not self.pins_known and (seconds is None or seconds > 0):
            began = time.monotonic()
            left = (self._unheard_until_ms - now_ms()) / 1000
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                await asyncio.wait_for(self._heard.wait(), left if seconds is None else min(left, seconds))
            self.check_open()
            seconds = None if seconds is None else seconds - (time.monotonic() - began)
        return self.pins_known

    # ---------------------------------------------------------------- small things

    def host(self, host_id: str) -> int:
        """Return the number of a host; 0, which prefers none, for one without a name, and beyond the bound."""
        if not host_id or (host_id not in self._hosts and len(self._hosts) >= _HOSTS_MAX):
            return 0
        return self._hosts.setdefault(host_id, len(self._hosts) + 1)

    def namespace(self, name: str) -> int:
        """Return the number of a namespace; 0, which no chunk has, for one that nobody has put into."""
        return self.namespaces.numbers.get(name, 0)

    @staticmethod
    async def durable(done: Future[None]) -> None:
        """Wait for a change of the store.

        Raises:
            StoreUnavailableError: it failed.
        """
        if not done.done():
            await asyncio.wrap_future(done)
        done.result()

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin steps that belong together. The master ends only after them."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run steps that belong together, also when the call that began them is given up by its caller."""
        return await asyncio.shield(self.run(work))

    def check_open(self) -> None:
        """Raise MasterClosedError when the master is being stopped."""
        if self.closing.is_set():
            raise MasterClosedError("the master is being stopped", retryable=True, hint="another master, or later")

    # ---------------------------------------------------------------- space

    def freed(self) -> None:
        """Space was freed: puts that wait look again."""
        self._space.set()
        self._space = asyncio.Event()

    async def wait_for_space(self, seconds: float) -> None:
        """Wait until space is freed, or for so long."""
        try:
            await asyncio.wait_for(self._space.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return

    async def evict(self, want_bytes: int, *, demote: bool = False, **spared: Any) -> int:
        """Have chunks leave memory by the policy, durably, but for what is spared.

        What is on a disk too stays there. The rest is gone, unless `demote` has it copied to the disk of its node.

        Args:
            want_bytes: how many.
            demote: copy first what is worth it.
            spared: as `ChunkIndex.evict` takes it.

        Returns:
            Bytes that were given up, or will be when they are copied; some may wait for leases.

        Raises:
            StoreUnavailableError: what was evicted is gone, but its space is not free before the store works again.
        """
        if now_ms() < self.held_until_ms or not self.pins_known:
            return 0
        if demote and self.disks.any:
            slots, records, lost, freed, moves, full = self.index.evict(
                want_bytes,
                now_ms(),
                uses_min=self.settings.disk_uses,
                count_max=COUNT_MAX,
                bytes_max=self.settings.copy_bytes,
                avoid=self.disks.crowded(),
                **spared,
            )
            if full != NO_SEGMENT:
                await self.disks.make_room(full, self.settings.copy_bytes)
        else:
            slots, records, lost, freed, moves, _ = self.index.evict(want_bytes, now_ms(), **spared)
        if moves:
            await self.disks.carry_out(moves)
        if slots:
            self.metrics.counts["evicted_bytes"] += lost
            self.events.add(Entry(pb.Event.EVICTED, records))
            await self.to_the_end(self.delete(slots))
        return freed

    async def delete(self, slots: bytes) -> None:
        """Remove records of chunks that the index has given up, then free their space.

        Raises:
            StoreUnavailableError: it is tried again until the store takes it, and the chunks are gone for every call.
        """
        try:
            await self.durable(self.store.apply(b"", b"", slots))
        except (StoreUnavailableError, StoreDamagedError) as error:
            self._undeleted += slots
            if self.store.lost is not None:
                raise self.store.lost from error
            raise StoreUnavailableError(
                f"the removal of {len(slots) // 4} chunks is not durable yet: a restart now would bring them back",
                cause=str(error),
                retryable=True,
                hint="see the disk; it is tried again without you, and asking again says when it is done",
            ) from error
        self._unreclaimed += slots
        self._reclaim()

    async def delete_again(self) -> None:
        """Try once more what the store has not taken.

        Raises:
            StoreUnavailableError: it still does not.
        """
        if self._undeleted or self._deleting.locked():
            await self.to_the_end(self._delete_again())

    async def _delete_again(self) -> None:
        async with self._deleting:
            if self._undeleted:
                slots, self._undeleted = bytes(self._undeleted), bytearray()
                await self.delete(slots)

    def _reclaim(self) -> None:
        slots = bytes(self._unreclaimed) if now_ms() >= self.held_until_ms else b""
        freed = self.index.reclaim(slots, now_ms())
        # Not before: without memory the index has done nothing, and the next round tries again.
        del self._unreclaimed[: len(slots)]
        if freed:
            self.freed()

    async def reclaim(self) -> None:
        """Free what has waited for leases, for an earlier start's readers, for the store, or for memory."""
        for slots in self._unpublished[:]:
            self._publish(slots)
            self._unpublished.remove(slots)
        await self.delete_again()
        self._reclaim()

    def publish(self, slots: bytes) -> None:
        """Make visible what is durable now.

        Raises:
            MemoryError: there was none. It is tried again, until it is visible.
        """
        try:
            self._publish(slots)
        except MemoryError:
            self._unpublished.append(slots)
            raise

    def _publish(self, slots: bytes) -> None:
        complete = self.index.publish(slots)
        if complete:
            self.events.add(Entry(pb.Event.COMMITTED, complete))

    @property
    def waiting_for_store(self) -> int:
        """Chunks whose removal the store has not taken."""
        return len(self._undeleted) // 4

    # ---------------------------------------------------------------- sessions

    def end_session(self, session: Session, why: str) -> None:
        """It is over: its pins end, its writes are given up, its segments are lost."""
        session.given_up += 1
        # First: without memory nothing has changed, and it is tried again.
        self.index.drop_owner(session.owner)
        _log.info("session of %r ends: %s", session.name, why)
        self.sessions.end(session)
        self.replays.forget(session)
        self.heard(session.id)
        session.pins.clear()
        for segment in self.segments.of(session):
            if segment.row.disk:
                self.detach(segment, why)
            else:
                self.lose(segment, why)

    def lose(self, segment: Segment, why: str) -> None:
        """A segment is gone, and what was being copied into it."""
        self.segments.lose(segment, why, self.sweep_round)
        self.copies.lost(segment.row.segment)

    def detach(self, disk: Segment, why: str) -> None:
        """A disk is away, and what was being copied to it is over."""
        self.segments.detach(disk, why)
        self.copies.lost(disk.row.segment)

    async def keep_writer(self, session: Session) -> None:
        """See that the store knows who may write or pin from now on.

        Raises:
            StoreUnavailableError: it does not.
            SessionUnknownError: the session has ended meanwhile.
        """
        if self.store.lost is not None:
            raise self.store.lost
        if session.kept is None or (session.kept.done() and session.kept.exception() is not None):
            session.kept = self.store.put_writer(Writer(session.id, session.incarnation))
        await self.durable(session.kept)
        self.sessions.get(session.id)

    def forget_writers(self, waiting: set[int]) -> None:
        """Forget sessions that have ended and of which nothing waits for a fence.

        Args:
            waiting: owners of whom something does.
        """
        over = [session for owner, session in self.sessions.ended.items() if owner not in waiting]
        ids = [session.id for session in over if session.kept is not None and session.id not in self.old_writers]
        for session in over:
            self.sessions.forget(session)
        if self.old_writers and self._every_segment_is_settled():
            ids += list(self.old_writers)
            self.old_writers.clear()
        # One that came back under its old id is a writer still.
        ids = [session for session in ids if session not in self.sessions.alive]
        if ids:
            self.store.remove_writers(ids)

    def _every_segment_is_settled(self) -> bool:
        return all(
            segment.row.lost or segment.row.disk or (segment.session is not None and not segment.unfenced)
            for segment in self.segments.all.values()
        )

    def say_goodbye(self) -> None:
        """End streams, and have what waits give up."""
        self.closing.set()
        self.events.wake()
        self.freed()
        for session in self.sessions.alive.values():
            if session.outbox is not None:
                session.outbox.close()

    async def close(self) -> None:
        """Finish what was begun."""
        self.closing.set()
        await self.supervisor.close()
        try:
            await self.delete_again()
        except StoreUnavailableError as error:
            _log.error("%s", error)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
