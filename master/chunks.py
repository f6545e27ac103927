# SPDX-License-Identifier: Apache-2.0
"""The calls about chunks. Each is one call of the index, whatever the size of its batch."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from moonpool.master.core import Core, granted_ms
from moonpool.master.errors import InvalidRequestError, LimitError
from moonpool.master.events import Entry
from moonpool.master.packed import HASH_BYTES, count_of, positions, sized, take
from moonpool.master.putting import Put
from moonpool.master.sessions import PINS_MAX, Session
from moonpool.proto import pool_pb2 as pb

__all__ = ["ChunkCalls"]

_REPLICAS_MAX: Final = 8
_RANGE_BYTES: Final = 16
_SPARED_MAX: Final = 4096 * _RANGE_BYTES
# How long a removal waits for those who may hold pins, in seconds. A caller gives up after a few more.
_PINS_WAIT: Final = 1.0
# How long a look-up waits for disks. A caller asks again.
_LOAD_WAIT_MS: Final = 2000
# The owner of no session.
_NOBODY: Final = 0


class ChunkCalls:
    """Puts, reads, removals and pins."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lease_max_ms = round(core.settings.lease_max * 1000)

    def _count(self, hashes: bytes) -> int:
        return count_of(hashes, self._core.settings.batch_max)

    # ---------------------------------------------------------------- puts

    async def PutStart(self, request: pb.PutStartRequest) -> pb.PutStartReply:
        """Give room for chunks."""
        core = self._core
        core.check_open()
        session = core.sessions.get(request.session)
        await core.keep_writer(session)
        count = self._count(request.hashes)
        sized("lengths", request.lengths, 8, 8 * count)
        sized("parents", request.parents, 0, HASH_BYTES, HASH_BYTES * count)
        if len(request.spared) > _SPARED_MAX or len(request.spared) % _RANGE_BYTES:
            raise InvalidRequestError(
                f"spared has {len(request.spared)} bytes", hint=f"{_RANGE_BYTES} each, {_SPARED_MAX} at most"
            )
        if request.replicas > _REPLICAS_MAX:
            raise InvalidRequestError(f"{request.replicas} replicas", hint=f"{_REPLICAS_MAX} at most")
        shards_max = core.settings.shards_max
        if request.shards > shards_max:
            raise InvalidRequestError(
                f"chunks of {request.shards} shards", hint=f"at most {shards_max}: shards_max of the master"
            )
        async with core.namespaces.put_into(request.namespace) as namespace:
            return await core.replays.once_later(
                session, request.request, lambda: Put(core, session, namespace, request).run()
            )

    async def PutCommit(self, request: pb.PutCommitRequest) -> pb.ItemsReply:
        """Make chunks visible, after they are durable."""
        core = self._core
        session = core.sessions.get(request.session)
        count = self._count(request.hashes)
        sized("generations", request.generations, 8 * count)
        sized("written", request.written, 0, count)
        if request.written:
            # A replica that was not written may be in the middle of it: its space waits for a fence.
            session.given_up += 1
        statuses, slots, records = core.index.commit(
            session.owner,
            core.namespace(request.namespace),
            request.hashes,
            request.generations,
            request.shard,
            request.written,
        )
        if slots:
            kept = core.store.apply(slots, records, b"")
            if kept.done():
                # Usual with the store in memory; a task would be half of the work.
                self._publish(slots, kept.exception())
            else:
                await core.to_the_end(self._publish_when(slots, asyncio.wrap_future(kept)))
        return pb.ItemsReply(header=core.header, statuses=statuses)

    async def _publish_when(self, slots: bytes, kept: asyncio.Future[None]) -> None:
        await asyncio.wait([kept])
        self._publish(slots, kept.exception())

    def _publish(self, slots: bytes, failure: BaseException | None) -> None:
        core = self._core
        if failure is not None:
            core.index.revoke(slots)
            raise failure
        core.publish(slots)

    def PutAbort(self, request: pb.PutAbortRequest) -> pb.ItemsReply:
        """Give up what PutStart gave."""
        core = self._core
        session = core.sessions.get(request.session)
        sized("generations", request.generations, 8 * self._count(request.hashes))
        if not request.settled:
            session.given_up += 1
        statuses = core.index.abort(
            session.owner,
            core.namespace(request.namespace),
            request.hashes,
            request.generations,
            request.shard,
            request.settled,
        )
        if request.settled:
            core.freed()
        elif (loop := core.supervisor.loops.get("fences")) is not None:
            loop.wake()
        return pb.ItemsReply(header=core.header, statuses=statuses)

    # ---------------------------------------------------------------- reads

    def Exists(self, request: pb.ExistsRequest) -> pb.ItemsReply:
        """Say which chunks are there. It extends nothing."""
        core, hashes = self._core, request.hashes
        self._count(hashes)
        statuses = core.index.exists(core.namespace(request.namespace), hashes)
        return pb.ItemsReply(header=core.header, statuses=statuses)

    def MatchPrefix(self, request: pb.MatchPrefixRequest) -> pb.MatchPrefixReply:
        """Say how many of the first chunks are there."""
        core, hashes = self._core, request.hashes
        count = self._count(hashes)
        lease = min(request.lease_ms, self._lease_max_ms)
        namespace = core.namespace(request.namespace)
        matched = core.index.match_prefix(namespace, hashes, granted_ms(), lease)
        core.metrics.counts["lookups_items"] += count
        core.metrics.counts["lookup_hits_items"] += matched
        extents, replicas = b"", 0
        if request.want_extents and matched:
            some = hashes[: matched * HASH_BYTES]
            # Not one step with the above: a removal in between leaves no extent, and a get is then a miss.
            _, extents, replicas = core.index.locate(namespace, some, request.shard, granted_ms(), lease)
        if lease and matched:
            core.disks.prefetch(namespace, hashes[: matched * HASH_BYTES], request.shard)
        return pb.MatchPrefixReply(
            header=core.header, matched=matched, lease_ms=lease, extents=extents, replicas=replicas
        )

    async def Locate(self, request: pb.LocateRequest) -> pb.LocateReply:
        """Say where chunks are, for as long as the lease. What lies on disks is read into memory first."""
        core, hashes = self._core, request.hashes
        count = self._count(hashes)
        lease = min(request.lease_ms, self._lease_max_ms)
        namespace = core.namespace(request.namespace)
        statuses, extents, replicas = core.index.locate(namespace, hashes, request.shard, granted_ms(), lease)
        if pb.LOADING in statuses:
            # The caller counts its lease from when it asked: the rest of it is to be enough for reading.
            wait = min(request.wait_ms, lease // 2, _LOAD_WAIT_MS) / 1000
            loading = positions(statuses, pb.LOADING)
            hopeless = await core.disks.load(namespace, take(hashes, HASH_BYTES, loading), request.shard, wait)
            statuses, extents, replicas = core.index.locate(namespace, hashes, request.shard, granted_ms(), lease)
            if hopeless:
                statuses = _misses(statuses, [loading[place] for place in hopeless])
        core.metrics.counts["lookups_items"] += count
        core.metrics.counts["lookup_hits_items"] += statuses.count(pb.OK)
        return pb.LocateReply(header=core.header, statuses=statuses, extents=extents, replicas=replicas, lease_ms=lease)

    # ---------------------------------------------------------------- removal

    async def Remove(self, request: pb.RemoveRequest) -> pb.ItemsReply:
        """Remove chunks."""
        core = self._core
        sized("generations", request.generations, 0, 8 * self._count(request.hashes))
        if not await core.wait_for_pins(_PINS_WAIT):
            return self._perhaps_pinned(request)
        if not request.session:
            return await core.to_the_end(self._remove(request))
        session = core.sessions.get(request.session)
        return await core.replays.once_later(session, request.request, lambda: core.to_the_end(self._remove(request)))

    def _perhaps_pinned(self, request: pb.RemoveRequest) -> pb.ItemsReply:
        """Say that whatever is there is in use."""
        index = self._core.index
        statuses = index.pin(_NOBODY, 0, self._core.namespace(request.namespace), request.hashes)
        index.unpin(_NOBODY, 0)
        there = bytes(pb.NOT_FOUND if status == pb.NOT_FOUND else pb.IN_USE for status in statuses)
        return pb.ItemsReply(header=self._core.header, statuses=there)

    async def _remove(self, request: pb.RemoveRequest) -> pb.ItemsReply:
        core = self._core
        # What is said to be gone has to be gone after a restart too, whoever has removed it.
        await core.delete_again()
        namespace = core.namespace(request.namespace)
        statuses, slots = core.index.remove(namespace, request.hashes, request.generations or None)
        if slots:
            number = namespace.to_bytes(4, "little")
            core.events.add(
                Entry(
                    pb.Event.REMOVED,
                    b"".join(
                        number + request.hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
                        for place, status in enumerate(statuses)
                        if status == pb.OK
                    ),
                )
            )
            await core.delete(slots)
        return pb.ItemsReply(header=core.header, statuses=statuses)

    async def RemovePrefix(self, request: pb.RemovePrefixRequest) -> pb.RemovePrefixReply:
        """Remove a chunk and all that descend from it."""
        core = self._core
        sized("hash", request.hash, HASH_BYTES)
        await core.wait_for_pins(None)
        await core.delete_again()
        namespace = core.namespace(request.namespace)
        # There may be millions.
        slots, in_use = await asyncio.to_thread(core.index.remove_prefix, namespace, request.hash)
        if slots:
            core.events.add(Entry(pb.Event.REMOVED, namespace.to_bytes(4, "little") + request.hash, descendants=True))
            await core.to_the_end(core.delete(slots))
        return pb.RemovePrefixReply(header=core.header, removed=len(slots) // 4, in_use=in_use)

    # ---------------------------------------------------------------- pins

    async def Pin(self, request: pb.PinRequest) -> pb.PinReply:
        """Keep chunks for as long as the session, or until Unpin."""
        core = self._core
        session = core.sessions.get(request.session)
        self._count(request.hashes)
        await core.keep_writer(session)  # a later master waits for who may hold pins
        if len(session.pins) >= PINS_MAX:
            raise LimitError(f"the session holds {len(session.pins)} pins", hint="fewer, of more chunks each")
        return core.replays.once(session, request.request, lambda: self._pin(session, request))

    def _pin(self, session: Session, request: pb.PinRequest) -> pb.PinReply:
        core = self._core
        # Random: a session asserts its pins again to a master that has given none of them.
        pin = secrets.randbits(63) or 1
        statuses = core.index.pin(session.owner, pin, core.namespace(request.namespace), request.hashes)
        pinned = statuses.count(pb.OK)
        if pinned:
            session.pins[pin] = pinned
        return pb.PinReply(header=core.header, statuses=statuses, pin=pin if pinned else 0)

    def Unpin(self, request: pb.UnpinRequest) -> pb.UnpinReply:
        """Let go of what a handle holds."""
        core = self._core
        session = core.sessions.get(request.session)
        unpinned = 0
        # Only its own: a handle of somebody else, or one that was let go of before, is none.
        if session.pins.pop(request.pin, None) is not None:
            unpinned = core.index.unpin(session.owner, request.pin)
        return pb.UnpinReply(header=core.header, unpinned=unpinned)


def _misses(statuses: bytes, places: list[int]) -> bytes:
    """Return statuses in which what cannot be loaded is not there."""
    found = bytearray(statuses)
    for place in places:
        if found[place] == pb.LOADING:
            found[place] = pb.NOT_FOUND
    return bytes(found)
