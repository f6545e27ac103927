# SPDX-License-Identifier: Apache-2.0
"""Moving headers and payloads of many chunks between memory of this process and segments."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.store_client.leaves import leaves_of, table_bytes
from moonpool.store_client.packing import HEADER_BYTES, Headers, Int64s
from moonpool.store_client.segments import Target
from moonpool.store_client.spans import Spans
from moonpool.transfer_engine import LEAF_BYTES, Region, Status, Transfer, TransferEngine, TransferState, copy_batch

__all__ = ["Move", "Moved", "Parts", "Place"]

Parts: TypeAlias = Literal["both", "payloads", "headers"]

_OK: Final = int(Status.OK)
# After its deadline, until a transfer that nobody waits for is over.
_UNKNOWN: Final = 5.0


@dataclass
class Place:
    """Where chunks lie in this process, one row for each.

    Attributes:
        region: holds the payloads, or what is moved of them; or the spans that do.
        offsets: of these.
        lengths: of these.
        headers: holds the headers, and the tables of leaves.
        header_offsets: of the headers, 64 bytes each.
        table_offsets: of the tables.
        sizes: of the whole payloads.
        joined: whether each payload lies right behind its header in the same region.
        starts: of ranges, where in its payload that begins of which leaves are moved. None: whole payloads.
    """

    region: Region | Spans
    offsets: Int64s
    lengths: Int64s
    headers: Region
    header_offsets: Int64s
    table_offsets: Int64s
    sizes: Int64s
    joined: bool
    starts: Int64s | None = None

    @property
    def in_spans(self) -> bool:
        """Whether payloads lie in spans: then an engine, which looks at these one by one, has no digest of a leaf."""
        return isinstance(self.region, Spans)

    def headers_at(self, rows: npt.NDArray[np.intp]) -> Headers:
        """Return the headers of some rows, as they lie here now."""
        found = np.empty((len(rows), HEADER_BYTES // 8), dtype="<u8")
        copy_batch(found, HEADER_BYTES * np.arange(len(rows)), self.headers, self.header_offsets[rows], HEADER_BYTES)
        return found


@dataclass
class Moved:
    """How that ended.

    Attributes:
        good: for each row whether all of it is in place.
        digests: as the engine computed them: of each leaf of each row for a put and for ranges, else of each payload;
            None when it was not asked. Of rows that are not good, anything.
        error: the first cause, when some are not good.
        settled: whether nothing of it can touch memory any more, here or there.
    """

    good: npt.NDArray[np.bool_]
    digests: npt.NDArray[np.uint64] | None = None
    error: MoonpoolError | None = None
    settled: bool = True


@dataclass
class _Group:
    # Items of one transfer; `which` of the regions each lies in, None: there is one. `owners`: the rows they belong to.
    regions: tuple[Region, ...]
    which: Int64s | None
    offsets: Int64s
    remote: Int64s
    lengths: Int64s
    owners: npt.NDArray[np.intp]


class Items:
    """The items of one transfer, in groups. The payloads are the first group; all others lie with the headers."""

    def __init__(self, place: Place, rows: npt.NDArray[np.intp], remote_offsets: Int64s) -> None:
        self._place = place
        self._rows = rows
        self._remote = remote_offsets
        self._every = np.arange(len(rows))
        self._groups: list[_Group] = []

    def add_payloads(self, *, by_leaf: bool) -> None:
        """Add what is moved of the payloads, each as one item or by its leaves."""
        place, rows = self._place, self._rows
        remote, lengths = self._remote + HEADER_BYTES, place.lengths[rows]
        if place.starts is not None:
            remote = remote + place.starts[rows]
        if not by_leaf:
            self._add(place.region, place.offsets[rows], remote, lengths, self._every)
            return
        leaves = leaves_of(lengths)
        own = leaves.owners
        local = place.offsets[rows[own]] + leaves.starts
        self._add(place.region, local, remote[own] + leaves.starts, leaves.lengths, own)

    def add_joined(self) -> None:
        """Add headers and payloads, which lie behind them, as one item each."""
        place, rows = self._place, self._rows
        lengths = place.lengths[rows] + HEADER_BYTES
        self._add(place.headers, place.header_offsets[rows], self._remote, lengths, self._every)

    def add_headers(self) -> None:
        """Add the headers."""
        place, rows = self._place, self._rows
        lengths = np.full(len(rows), HEADER_BYTES, dtype=np.int64)
        self._add(place.headers, place.header_offsets[rows], self._remote, lengths, self._every)

    def add_tables(self) -> None:
        """Add the tables of those that have one."""
        place, rows = self._place, self._rows
        sizes = place.sizes[rows]
        which = np.flatnonzero(sizes > LEAF_BYTES)
        if len(which):
            sizes = sizes[which]
            remote = self._remote[which] + HEADER_BYTES + sizes
            self._add(place.headers, place.table_offsets[rows[which]], remote, table_bytes(sizes), which)

    @property
    def first(self) -> int:
        """How many are in the first group."""
        return len(self._groups[0].offsets)

    @property
    def owners(self) -> npt.NDArray[np.intp]:
        """Which of the rows each item belongs to."""
        return np.concatenate([group.owners for group in self._groups])

    def columns(self) -> tuple[Any, Int64s, Int64s, Int64s]:
        """Return the local regions, the local and remote offsets and the lengths, as the engine takes them."""
        groups = self._groups
        offsets, remote, lengths = (
            np.concatenate([getattr(group, column) for group in groups])
            if len(groups) > 1
            else getattr(groups[0], column)
            for column in ("offsets", "remote", "lengths")
        )
        regions = groups[0].regions
        if len(regions) == 1 and all(group.regions == regions for group in groups):
            return regions[0], offsets, remote, lengths
        which: list[Int64s] = []
        several: list[Region] = []
        for group in groups:
            own = np.zeros(len(group.offsets), dtype=np.int64) if group.which is None else group.which
            which.append(own + len(several))
            several.extend(group.regions)
        return (several, np.concatenate(which)), offsets, remote, lengths

    def _add(
        self,
        memory: Region | Spans,
        offsets: Int64s,
        remote: Int64s,
        lengths: Int64s,
        owners: npt.NDArray[np.intp],
    ) -> None:
        if isinstance(memory, Spans):
            cut = memory.cut(offsets, lengths)
            own = cut.owners
            group = _Group(memory.regions, cut.which, cut.offsets, remote[own] + cut.skips, cut.lengths, owners[own])
        else:
            group = _Group((memory,), None, offsets, remote, lengths, owners)
        self._groups.append(group)


class Move:
    """The transfer of one batch to or from one segment, under way."""

    def __init__(self, place: Place, rows: npt.NDArray[np.intp], remote_offsets: Int64s, digest: bool, parts: Parts):
        """Say what is to be moved.

        Args:
            place: where the chunks lie here.
            rows: which of them.
            remote_offsets: of their extents in the segment, for each of `rows`.
            digest: have the engine compute the digests of payloads on the way. Not with "headers".
            parts: what of the chunks. "headers" are those and the tables; "both" brings tables for ranges alone.
        """
        self._rows = len(rows)
        self._items = items = Items(place, rows, remote_offsets)
        self._digest = digest
        self._transfer: Transfer | None = None
        self._error: MoonpoolError | None = None
        self._unknown_until = 0.0
        ranged = place.starts is not None
        if parts == "both" and place.joined and not digest:
            items.add_joined()
            return
        if parts != "headers":
            items.add_payloads(by_leaf=digest and (ranged or parts == "payloads"))
        if parts != "payloads":
            items.add_headers()
        if parts == "headers" or ranged:
            items.add_tables()

    def start(self, engine: TransferEngine, target: Target, op: Literal["read", "write"], deadline: float) -> None:
        """Start, in one transfer.

        Args:
            engine: of this client.
            target: the segment.
            op: ``"read"`` from it or ``"write"`` to it.
            deadline: of `time.monotonic`.
        """
        submit = engine.read if op == "read" else engine.write
        local, local_offsets, remote, lengths = self._items.columns()
        # Ctrl-C may come when the transfer runs, and nothing here knows of it yet.
        self._unknown_until = deadline + _UNKNOWN
        try:
            self._transfer = submit(
                target.peer,
                local,
                target.region,
                local_offsets,
                remote,
                lengths,
                deadline_at=deadline,
                digest=self._digest,
            )
        except Exception as error:
            self._unknown_until = 0.0  # nothing was started
            if not isinstance(error, MoonpoolError):
                raise
            self._error = error

    @property
    def refused(self) -> MoonpoolError | None:
        """Why the engine did not begin the transfer, before any node had heard of it."""
        return self._error

    @property
    def settled(self) -> bool:
        """Whether nothing of it can touch memory any more, here or there."""
        return time.monotonic() >= self._unknown_until if self._transfer is None else self._transfer.settled

    def cancel(self, settle_seconds: float) -> None:
        """Stop what is still running."""
        if self._transfer is not None:
            _settle(self._transfer, settle_seconds)

    def finish(self, settle_seconds: float) -> Moved:
        """Wait for the end, which the deadline guarantees, and say what is in place.

        Args:
            settle_seconds: how long a transfer that failed is waited for until it can touch no memory any more.
        """
        moved = Moved(np.full(self._rows, self._error is None), error=self._error)
        transfer = self._transfer
        if transfer is None:
            return moved
        try:
            transfer.wait()
        except MoonpoolError as error:
            statuses = np.frombuffer(transfer.statuses, dtype=np.uint8)
            moved.good[self._items.owners[statuses != _OK]] = False
            moved.error = error
            moved.settled = _settle(transfer, settle_seconds)
            if not moved.settled:
                return moved
        if self._digest and (digests := transfer.digests) is not None:
            moved.digests = np.frombuffer(digests, dtype=np.uint64)[: self._items.first]
        return moved


def _settle(transfer: Transfer, seconds: float) -> bool:
    if transfer.settled:
        return True
    try:
        return transfer.cancel(seconds) is not TransferState.UNSETTLED
    except MoonpoolError:
        # Not in time. Who owns the memory is told so.
        return False
