# SPDX-License-Identifier: Apache-2.0
"""Copies of chunks of which somebody has read something that is not what it should be. Used from the event loop only.

Whoever says so may be the one with the bad NIC. So the node that holds such a copy looks at its own memory, and what it
does not find spoilt itself stays. What it finds so moves elsewhere, with the bytes of another copy. Where there is none
that can be read, or no room, it is dropped; a chunk of which no copy is left is removed.
"""

from __future__ import annotations

import itertools
import logging
import struct
from typing import TYPE_CHECKING, Final

from moonpool._index import NO_SEGMENT
from moonpool.master.clock import now_ms
from moonpool.master.copies import COUNT_MAX, Copy, Move, moves_of
from moonpool.master.errors import StoreUnavailableError
from moonpool.master.events import Entry
from moonpool.master.packed import HASH_BYTES, count_of, positions, sized
from moonpool.proto import pool_pb2 as pb

if TYPE_CHECKING:
    from moonpool.master.core import Core

__all__ = ["Mending"]

_log = logging.getLogger("moonpool.master")
# Calls that wait for nodes to look. What is beyond that will be found again.
_WAITING_MAX: Final = 256


class Mending:
    """Args: the master's state."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting = 0

    def named(self, request: pb.ReportFailureRequest) -> list[Move]:
        """Return which copies a report is about, as far as they are there still.

        Raises:
            InvalidRequestError: the request makes no sense.
        """
        core, count = self._core, count_of(request.hashes, COUNT_MAX)
        sized("generations", request.generations, 8 * count)
        if now_ms() < core.held_until_ms:
            return []  # what would be given up may have readers of before, and nobody knows which
        namespace = core.namespace(request.namespace)
        _, packed, replicas = core.index.locate(namespace, request.hashes, request.shard, now_ms(), 0)
        looks = []
        for at, (generation, there, length, segment, _) in enumerate(struct.iter_unpack("<QQQII", packed)):
            place = at // replicas
            if (segment, generation.to_bytes(8, "little")) == (request.segment, request.generations[8 * place :][:8]):
                its = request.hashes[HASH_BYTES * place :][:HASH_BYTES]
                looks.append(
                    Move(
                        0, segment, segment, segment, namespace, generation, there, there, length, request.shard, 0, its
                    )
                )
        return looks

    async def finds_nothing(self, segment: int, looks: list[Move]) -> bool:
        """Mend what a client has named. Returns whether its node has nothing to say against all of that."""
        return bool(looks) and self._waiting < _WAITING_MAX and not await self.mend(segment, looks)

    async def mend(self, number: int, looks: list[Move]) -> list[Move]:
        """Have the node of a segment look at these copies, and replace or drop what it finds spoilt.

        Returns:
            What it finds spoilt.
        """
        segment = self._core.segments.all.get(number)
        if segment is None or self._waiting >= _WAITING_MAX:
            return []
        self._waiting += 1
        try:
            async with segment.mending:
                bad = await self._look(looks) if segment.connected else []
                others = await self._replace(bad) if bad else []
        finally:
            self._waiting -= 1
        for source, its in itertools.groupby(sorted(others, key=lambda look: look.source), lambda look: look.source):
            await self.mend(source, list(its))
        return bad

    async def _look(self, looks: list[Move]) -> list[Move]:
        """Return which of these its node finds spoilt."""
        (copy,) = self._core.copies.begin(looks)
        await self._core.copies.ended([copy])
        found = copy.done.result() if copy.done.done() else b""
        return [look for look, status in zip(looks, found, strict=False) if status == pb.SPOILT]

    async def _replace(self, bad: list[Move]) -> list[Move]:
        """Replace copies that are spoilt, or drop them. Returns others that were read for it and seem to be so too."""
        counts, others, left = self._core.metrics.counts, [], []
        _log.warning("%d chunks are spoilt in segment %d: %s", len(bad), bad[0].source, bad[0].hash.hex())
        copies = await self._begin(bad, replace=True)
        await self._core.copies.ended(copies)
        for copy in copies:
            found = copy.done.result() if copy.done.done() else bytes([pb.WRITING]) * len(copy.moves)
            counts["spoilt_replaced_items"] += found.count(pb.OK)
            failed = {move.hash for move, status in zip(copy.moves, found, strict=True) if status != pb.OK}
            others += [copy.moves[place].look() for place in positions(found, pb.SPOILT)]
            left += [look for look in bad if look.hash in failed]
        await self._begin(left, replace=False)
        return others

    async def _begin(self, bad: list[Move], *, replace: bool) -> list[Copy]:
        """Begin to replace those that can be, if that is wanted, and drop the others."""
        core, moves, slots, lost = self._core, b"", b"", b""
        # Not within the bounds of a drain: what is replaced gives up as much room as it takes.
        for look in bad:
            status, more, gone = core.index.mend(look.namespace, look.hash, look.shard, look.extent, replace, now_ms())
            moves, slots = moves + more, slots + gone
            # Not what has gone, or is being replaced, since it was read.
            core.metrics.counts["spoilt_items"] += replace and status[0] == pb.OK
            lost += look.namespace.to_bytes(4, "little") + look.hash if gone else b""
        begun = moves_of(moves)
        copies = core.copies.begin([move for move in begun if move.target != NO_SEGMENT])
        await core.copies.commit([move for move in begun if move.target == NO_SEGMENT])
        if slots:
            core.metrics.counts["spoilt_lost_items"] += len(slots) // 4
            core.events.add(Entry(pb.Event.REMOVED, lost))
            try:
                await core.delete(slots)
            except StoreUnavailableError as error:
                _log.warning("%s", error)  # the loop that reclaims tries again
        return copies
