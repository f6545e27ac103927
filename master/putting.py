# SPDX-License-Identifier: Apache-2.0
"""One PutStart: give room, and where there is none, evict and try again for as long as the caller waits."""

from __future__ import annotations

import logging
import time
from typing import Final

from moonpool._index import EXTENT_BYTES
from moonpool.master.core import Core, granted_ms, now_ms
from moonpool.master.errors import StoreUnavailableError
from moonpool.master.packed import HASH_BYTES, per_item, positions, replace, room_for, take
from moonpool.master.sessions import Session
from moonpool.proto import pool_pb2 as pb

__all__ = ["Put"]

_log = logging.getLogger("moonpool.master")
# Longest wait for somebody else to free something before looking again.
_LOOK_S: Final = 0.05
_RETRY_AFTER_MS: Final = 100
# When eviction freed what was missing and it is still not enough, the free pieces are too small: free more at once.
_MORE: Final = 2
_MORE_MAX: Final = 16


class Put:
    """Args: the master's state, who asks, the number of the namespace, and the request, whose sizes were checked."""

    def __init__(self, core: Core, session: Session, namespace: int, request: pb.PutStartRequest) -> None:
        self._core = core
        self._session = session
        self._namespace = namespace
        self._request = request
        self._replicas = request.replicas or 1
        self._now = granted_ms()
        self._deadline_ms = self._now + round(core.settings.put_deadline * 1000)

    async def run(self) -> pb.PutStartReply:
        """Return the reply."""
        request, core = self._request, self._core
        begin_ms = round(core.settings.put_begin * 1000)
        self._session.begin_until_ms = max(self._session.begin_until_ms, self._now + begin_ms)
        statuses, extents = self._start(request.hashes, request.parents, request.lengths)
        refused = 0
        if pb.NO_SPACE in statuses:
            found, given = bytearray(statuses), bytearray(extents)
            core.waiting_puts += 1
            try:
                await self._make_room(found, given)
            except BaseException:
                self._take_back(found, given)
                raise
            finally:
                core.waiting_puts -= 1
            statuses, extents = bytes(found), bytes(given)
            refused = statuses.count(pb.NO_SPACE)
            core.metrics.counts["no_space_items"] += refused
        return pb.PutStartReply(
            header=core.header,
            statuses=statuses,
            extents=extents,
            replicas=self._replicas,
            deadline_ms=self._deadline_ms - self._now,
            begin_ms=begin_ms,
            retry_after_ms=_RETRY_AFTER_MS if refused else 0,
        )

    def _start(self, hashes: bytes, parents: bytes, lengths: bytes) -> tuple[bytes, bytes]:
        request = self._request
        return self._core.index.start(
            self._session.owner,
            self._namespace,
            hashes,
            parents,
            lengths,
            request.shard,
            request.shards or 1,
            self._replicas,
            request.avoid,
            self._session.host,
            now_ms(),
            self._deadline_ms,
        )

    async def _make_room(self, statuses: bytearray, extents: bytearray) -> None:
        core, request = self._core, self._request
        core.metrics.counts["put_waits_calls"] += 1
        # What was given already may be written only so long after the request; the caller wants some of that.
        until = time.monotonic() + min(request.wait_ms / 1000, core.settings.put_begin / 2)
        parents, more, evicted_in_all = per_item(request.parents, request.hashes), 1, 0
        # What is there of this batch, and what it hangs on, is not given up for the rest of it.
        there = take(request.hashes, HASH_BYTES, positions(statuses, pb.ALREADY))
        while missing := positions(statuses, pb.NO_SPACE):
            want = room_for(request.lengths, missing) * self._replicas
            evicted = 0
            if evicted_in_all <= want * _MORE_MAX and core.segments.any_writable(request.avoid):
                kept = there + (take(parents, HASH_BYTES, missing) if parents else b"")
                evicted = await self._evict(want * more, kept)
                evicted_in_all += evicted
            if not self._session.ended:
                self._again(missing, parents, statuses, extents)
            left = until - time.monotonic()
            if left <= 0 or self._session.ended or core.closing.is_set():
                return
            if evicted:
                more = min(more * _MORE, _MORE_MAX)
            elif pb.NO_SPACE in statuses:
                await core.wait_for_space(min(left, _LOOK_S))
                # Before more is evicted: a segment may take chunks now that waited for fences or leases.
                if not self._session.ended:
                    self._again(positions(statuses, pb.NO_SPACE), parents, statuses, extents)

    async def _evict(self, want: int, kept: bytes) -> int:
        try:
            return await self._core.evict(
                want, generations=self._request.spared, namespace=self._namespace, hashes=kept
            )
        except StoreUnavailableError as error:
            # The caller has been given a part, which it must hear of. The loop that reclaims tries again.
            _log.warning("what was evicted is not free yet: %s", error)
            return 0

    def _take_back(self, statuses: bytearray, extents: bytearray) -> None:
        """The caller is gone and has not heard of what it was given, so it cannot write there."""
        given = positions(statuses, pb.OK)
        if given and not self._session.ended:
            self._core.index.abort(
                self._session.owner,
                self._namespace,
                take(self._request.hashes, HASH_BYTES, given),
                b"".join([extents[EXTENT_BYTES * self._replicas * place :][:8] for place in given]),
                self._request.shard,
                True,
            )

    def _again(self, missing: list[int], parents: bytes, statuses: bytearray, extents: bytearray) -> None:
        request = self._request
        lengths = request.lengths if len(request.lengths) == 8 else take(request.lengths, 8, missing)
        some, given = self._start(
            take(request.hashes, HASH_BYTES, missing), take(parents, HASH_BYTES, missing) if parents else b"", lengths
        )
        replace(statuses, 1, missing, some)
        replace(extents, EXTENT_BYTES * self._replicas, missing, given)
