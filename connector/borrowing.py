# SPDX-License-Identifier: Apache-2.0
"""Blocks that another engine lends: read where they lie there, straight into the blocks of a request here.

A thread tells the other engine, again and again, that they are still needed, and in the end that they are not.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.connector.layout import CacheLayoutError
from moonpool.connector.lending import CACHE, FORM, RENEWED, RETURNED, SLOT_BYTES, SLOTS, TABLE
from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import ClosedError, DeadlineError

if TYPE_CHECKING:
    from moonpool.connector.counting import Counts
    from moonpool.connector.jobs import Lent
    from moonpool.connector.layout import Int64s, PagedCache
    from moonpool.transfer_engine import Peer, Region, RemoteRegion, Transfer, TransferEngine

__all__ = ["Borrowing", "LeaseLostError"]

_PEERS_MAX: Final = 256
_SAY_SECONDS: Final = 1.0
#: Until a lease that was said to be there is.
_COMING_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.002
#: Bytes that go together, so that a load that nobody needs any more ends soon.
_WINDOW_BYTES: Final = 32 << 20
#: A lease is renewed so often in its time, so that one message may be lost.
_RENEWALS: Final = 3
_HELD_MAX: Final = SLOTS
_COLUMNS: Final = ("storage", "offset", "stride", "length")


class LeaseLostError(MoonpoolError, RuntimeError):
    """Blocks of another engine are not lent any more, or are others."""

    default_code = "LEASE_LOST"


@dataclass(frozen=True, slots=True)
class _Lender:
    """A worker of another engine.

    Attributes:
        peer: the connection.
        table: of its leases.
        cache: the storages of its cache.
        storage: of each piece of a block, in which of them it is.
        offset: of each piece of block 0.
        stride: from block to block.
    """

    peer: Peer
    table: RemoteRegion
    cache: list[RemoteRegion]
    storage: Int64s
    offset: Int64s
    stride: Int64s


class Borrowing:
    """What one worker reads of other engines. Thread-safe.

    Args:
        engine: with which the cache is registered.
        cache: where blocks go.
        counts: of this worker.
        namespace: of what is in the cache.
        shard: the part of each chunk that this worker has.
        connect_timeout: seconds.
        threads: that call `read`, by their numbers.
        keeps: whether this worker is the one that tells other engines what is still needed.
    """

    def __init__(
        self,
        engine: TransferEngine,
        cache: PagedCache,
        counts: Counts,
        *,
        namespace: str,
        shard: int,
        connect_timeout: float,
        threads: int,
        keeps: bool,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._counts = counts
        self._namespace = namespace
        self._shard = shard
        self._connect_timeout = connect_timeout
        # For each thread that reads, and for the one here.
        self._slots = engine.allocate((threads + 1) * SLOT_BYTES)
        self._own_slot = threads
        self._storage, self._offset, self._stride, self._length = cache.pieces()
        self._blocks_together = max(1, _WINDOW_BYTES // max(1, int(self._length.sum())))
        self._connecting = threading.Lock()
        self._lenders: dict[str, _Lender] = {}
        self._changed = threading.Condition()
        self._held: dict[bytes, tuple[Lent, float]] = {}
        self._returning: list[Lent] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._keeps = keeps

    # ---------------------------------------------------------------- what is lent to this engine

    def hold(self, lent: Iterable[Lent]) -> None:
        """Tell the engines that lend these, again and again, that they are needed."""
        if not self._keeps:
            return
        with self._changed:
            for one in lent:
                if len(self._held) < _HELD_MAX:
                    self._held[one.token] = one, time.monotonic()
            if self._thread is None and self._held:
                self._thread = threading.Thread(target=self._keep, name="moonpool-borrowing", daemon=True)
                self._thread.start()
            self._changed.notify()

    def give_back(self, tokens: Iterable[bytes]) -> None:
        """Tell the engines that lend these that nobody needs them any more."""
        if not self._keeps:
            return
        with self._changed:
            self._returning += [self._held.pop(token)[0] for token in tokens if token in self._held]
            self._changed.notify()

    def close(self) -> None:
        """End what is read, and the thread. What is held ends by itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        with self._connecting:
            for lender in self._lenders.values():
                lender.peer.close()
            self._lenders.clear()
        if self._thread is not None:
            self._thread.join()

    # ---------------------------------------------------------------- blocks

    def read(self, lent: Lent, block_ids: list[int], until: float, thread: int) -> int:
        """Read blocks into blocks of this engine. When it returns or raises, nothing writes to them any more.

        Args:
            lent: which blocks, one for each of `block_ids`.
            block_ids: where they go.
            until: when the time is over, of `time.monotonic`.
            thread: number of the calling one.

        Returns:
            How many bytes.

        Raises:
            LeaseLostError: they were lent no more when they had come, or are not what this request needs.
            CacheLayoutError: the other engine has its KV in another form.
            MoonpoolError: the other engine cannot be reached, or is too slow.
        """
        lender = self._lender(lent, until)
        self._wait(lender, lent, until, thread)
        here, there = np.array(block_ids, dtype=np.int64), np.array(lent.block_ids, dtype=np.int64)
        for begin in range(0, len(here), self._blocks_together):
            some = slice(begin, begin + self._blocks_together)
            self._move(lender, here[some], there[some], until)
        self._check(lender, lent, until, thread)
        return len(here) * int(self._length.sum())

    def _move(self, lender: _Lender, here: Int64s, there: Int64s, until: float) -> None:
        into = self._offset + here[:, None] * self._stride
        source = lender.offset + there[:, None] * lender.stride
        which, length = np.broadcast_to(self._storage, into.shape), np.broadcast_to(self._length, into.shape)
        transfers = []
        try:
            for number, region in enumerate(lender.cache):
                its = np.broadcast_to(lender.storage == number, into.shape)
                local = self._cache.regions, which[its]
                transfers.append(
                    self._engine.read(
                        lender.peer, local, region, into[its], source[its], length[its], deadline_at=until
                    )
                )
            for transfer in transfers:
                transfer.wait()
        finally:
            for transfer in transfers:
                _settle(transfer)

    def _wait(self, lender: _Lender, lent: Lent, until: float, thread: int) -> None:
        # The answer of the other engine may be quicker than the step with which its workers hear of the lease.
        until, pause = min(until, time.monotonic() + _COMING_SECONDS), _LOOK_SECONDS
        while True:
            try:
                self._check(lender, lent, until, thread)
            except LeaseLostError:
                if time.monotonic() + pause >= until:
                    raise
            else:
                return
            time.sleep(pause)
            pause *= 2

    def _check(self, lender: _Lender, lent: Lent, until: float, thread: int, notify: bytes | None = None) -> None:
        at = thread * SLOT_BYTES
        transfer = self._engine.read(
            lender.peer,
            self._slots,
            lender.table,
            at,
            lent.slot * SLOT_BYTES,
            SLOT_BYTES,
            deadline_at=until,
            notify=notify,
        )
        try:
            transfer.wait()
        finally:
            _settle(transfer)
        if bytes(memoryview(self._slots).cast("B")[at : at + SLOT_BYTES]) != lent.token + lent.digest:
            raise LeaseLostError(
                "the blocks are not lent any more", peer=lender.peer.name, hint="a longer `peer_lease` there"
            )

    # ---------------------------------------------------------------- engines that lend

    def _lender(self, lent: Lent, until: float) -> _Lender:
        """Return the worker that has the same shard, connected, and the one that has lent the blocks."""
        if self._shard >= len(lent.peers):
            raise LeaseLostError("the other engine has no worker with this shard", hint="two engines set up alike")
        address, incarnation = lent.peers[self._shard]
        with self._connecting:
            if self._closing:
                raise ClosedError("the worker is shut down")
            known = self._lenders.get(address)
            if known is not None and known.peer.incarnation == incarnation:
                return known
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineError("the time is over before anything was begun")
            peer = self._engine.connect(address, min(left, self._connect_timeout))
            try:
                lender = self._meet(peer, incarnation, until)
            except BaseException:
                peer.close()
                raise
            # Not before: whoever names an incarnation that is none should not cost others their connection.
            if known is not None:
                del self._lenders[address]
                known.peer.close()
            elif len(self._lenders) >= _PEERS_MAX:
                self._lenders.pop(next(iter(self._lenders))).peer.close()
            self._lenders[address] = lender
            return lender

    def _meet(self, peer: Peer, incarnation: str, until: float) -> _Lender:
        if peer.incarnation != incarnation:
            raise LeaseLostError("the other engine was started anew meanwhile", peer=peer.name)
        form = self._form_of(peer, until)
        try:
            storage, offset, stride, length = (np.array(form[name], dtype=np.int64) for name in _COLUMNS)
            storages = range(int(form["storages"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CacheLayoutError(
                f"{peer.name!r} does not say how its cache lies, or in another way", hint="one version of moonpool"
            ) from error
        differs = {"namespace": self._namespace, "seal": self._cache.form()["seal"]}
        for what, own in differs.items():
            if form.get(what) != own:
                raise CacheLayoutError(
                    f"the cache of {peer.name!r} has another {what}", hint="two engines that are set up alike"
                )
        if not np.array_equal(length, self._length):
            raise CacheLayoutError(
                f"the cache of {peer.name!r} has its blocks in other pieces", hint="two engines that are set up alike"
            )
        cache = [peer.regions.wait(f"{CACHE}{number}", self._connect_timeout) for number in storages]
        return _Lender(peer, peer.regions.wait(TABLE, self._connect_timeout), cache, storage, offset, stride)

    def _form_of(self, peer: Peer, until: float) -> dict[str, Any]:
        there = peer.regions.wait(FORM, self._connect_timeout)
        here: Region = self._engine.allocate(there.nbytes)
        try:
            transfer = self._engine.read(peer, here, there, deadline_at=until)
            try:
                transfer.wait()
            finally:
                _settle(transfer)
            said = json.loads(bytes(memoryview(here).cast("B")))
        except ValueError:
            said = None
        finally:
            here.release()
        return said if isinstance(said, dict) else {}

    # ---------------------------------------------------------------- on the thread

    def _keep(self) -> None:
        while True:
            with self._changed:
                while not self._closing and not self._returning and (wait := self._next() - time.monotonic()) > 0:
                    self._changed.wait(None if math.isinf(wait) else wait)
                if self._closing:
                    return
                returning, self._returning = self._returning, []
                now = time.monotonic()
                due = [lent for lent, at in self._held.values() if at <= now]
                for lent in due:
                    self._held[lent.token] = lent, now + lent.seconds / _RENEWALS
            # An engine that does not answer takes time that others need: it is told once at a time, and not again of
            # what it has not heard. Whoever reads that finds it out.
            silent: set[tuple[tuple[str, str], ...]] = set()
            for lent, what in (*((one, RENEWED) for one in due), *((one, RETURNED) for one in returning)):
                if lent.peers not in silent and self._say(lent, what):
                    continue
                silent.add(lent.peers)
                with self._changed:
                    if lent.token in self._held:
                        self._held[lent.token] = lent, math.inf

    def _next(self) -> float:
        return min((at for _, at in self._held.values()), default=math.inf)

    def _say(self, lent: Lent, what: bytes) -> bool:
        until = time.monotonic() + _SAY_SECONDS
        try:
            self._check(self._lender(lent, until), lent, until, self._own_slot, what + lent.token)
        except LeaseLostError:
            # Maybe it is not there yet.
            return True
        except MoonpoolError as error:
            if not self._closing:
                self._counts.complain("a prefill engine was not told what is still needed of it", error)
            return False
        return True


def _settle(transfer: Transfer) -> None:
    # Its deadline bounds that.
    if not transfer.settled:
        transfer.cancel()
