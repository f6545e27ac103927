# SPDX-License-Identifier: Apache-2.0
"""Moving headers and payloads of many chunks between memory of this process and segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.store_client.packing import HEADER_BYTES, Int64s
from moonpool.store_client.segments import Target
from moonpool.transfer_engine import Region, Status, Transfer, TransferEngine, TransferState

__all__ = ["Move", "Moved", "Parts", "Place"]

Parts: TypeAlias = Literal["both", "payloads", "headers"]

_OK: Final = int(Status.OK)


@dataclass
class Place:
    """Where chunks lie in this process, one row for each.

    Attributes:
        region: holds the payloads.
        offsets: of the payloads.
        lengths: of the payloads.
        headers: holds the headers.
        header_offsets: of the headers, 64 bytes each.
        joined: whether each payload lies right behind its header in the same region.
    """

    region: Region
    offsets: Int64s
    lengths: Int64s
    headers: Region
    header_offsets: Int64s
    joined: bool


@dataclass
class Moved:
    """How that ended.

    Attributes:
        good: for each row whether header and payload are in place.
        digests: of the payloads, as the engine computed them; None when it was not asked.
        error: the first cause, when some are not good.
        settled: whether nothing of it can touch memory any more, here or there.
    """

    good: npt.NDArray[np.bool_]
    digests: npt.NDArray[np.uint64] | None = None
    error: MoonpoolError | None = None
    settled: bool = True


@dataclass
class _Part:
    # One transfer, and which of its items are which rows' headers or payloads.
    transfer: Transfer
    rows: int
    items: int  # per row: 1, or 2 when headers come first and payloads behind them
    payloads: bool  # whether its last `rows` items are payloads with a digest


class Move:
    """The transfers of one batch to or from one segment, under way."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parts: list[_Part] = []
        self._error: MoonpoolError | None = None

    @classmethod
    def start(
        cls,
        engine: TransferEngine,
        target: Target,
        op: Literal["read", "write"],
        place: Place,
        rows: npt.NDArray[np.intp],
        remote_offsets: Int64s,
        deadline: float,
        digest: bool,
        parts: Parts,
    ) -> Move:
        """Start to move the chunks `rows` of `place`.

        Args:
            engine: of this client.
            target: the segment.
            op: ``"read"`` from it or ``"write"`` to it.
            place: where they lie here.
            rows: which of them.
            remote_offsets: of their extents in the segment, for each of `rows`.
            deadline: of `time.monotonic`.
            digest: have the engine compute the digests of payloads on the way.
            parts: what of the chunks.
        """
        self = cls(len(rows))
        submit = engine.read if op == "read" else engine.write
        lengths = place.lengths[rows]
        remote_payloads = remote_offsets + HEADER_BYTES

        def begin(local: Region, offsets: Any, remote: Any, sizes: Any, items: int, payloads: bool) -> None:
            transfer = submit(
                target.peer,
                local,
                target.region,
                offsets,
                remote,
                sizes,
                deadline_at=deadline,
                digest=digest and payloads,
            )
            self._parts.append(_Part(transfer, len(rows), items, payloads))

        try:
            if parts == "payloads":
                begin(place.region, place.offsets[rows], remote_payloads, lengths, 1, True)
            elif parts == "headers":
                begin(place.headers, place.header_offsets[rows], remote_offsets, HEADER_BYTES, 1, False)
            elif place.joined and not digest:
                begin(place.headers, place.header_offsets[rows], remote_offsets, lengths + HEADER_BYTES, 1, False)
            elif place.headers is place.region:
                begin(
                    place.region,
                    np.concatenate((place.header_offsets[rows], place.offsets[rows])),
                    np.concatenate((remote_offsets, remote_payloads)),
                    np.concatenate((np.full(len(rows), HEADER_BYTES, dtype=np.int64), lengths)),
                    2,
                    True,
                )
            else:
                begin(place.region, place.offsets[rows], remote_payloads, lengths, 1, True)
                begin(place.headers, place.header_offsets[rows], remote_offsets, HEADER_BYTES, 1, False)
        except MoonpoolError as error:
            # Nothing of that transfer was started; an earlier one may have been.
            self._error = error
        return self

    @property
    def refused(self) -> MoonpoolError | None:
        """Why the engine did not begin a transfer, before any node had heard of it."""
        return self._error

    @property
    def unsettled(self) -> list[Transfer]:
        """The transfers that may still touch memory, here or there."""
        return [part.transfer for part in self._parts if not part.transfer.settled]

    def cancel(self, settle_seconds: float) -> None:
        """Stop what is still running."""
        for transfer in self.unsettled:
            _settle(transfer, settle_seconds)

    def finish(self, settle_seconds: float) -> Moved:
        """Wait for the end, which the deadline guarantees, and say what is in place.

        Args:
            settle_seconds: how long a transfer that failed is waited for until it can touch no memory any more.
        """
        moved = Moved(np.full(self._rows, self._error is None), error=self._error)
        for part in self._parts:
            self._finish(part, moved, settle_seconds)
        return moved

    def _finish(self, part: _Part, moved: Moved, settle_seconds: float) -> None:
        transfer = part.transfer
        try:
            transfer.wait()
        except MoonpoolError as error:
            statuses = np.frombuffer(transfer.statuses, dtype=np.uint8).reshape(part.items, part.rows)
            moved.good &= (statuses == _OK).all(axis=0)
            moved.error = moved.error or error
            if not _settle(transfer, settle_seconds):
                moved.settled = False
                return
        if part.payloads:
            digests = transfer.digests
            if digests is not None:
                moved.digests = np.frombuffer(digests, dtype=np.uint64)[-part.rows :]


def _settle(transfer: Transfer, seconds: float) -> bool:
    if transfer.settled:
        return True
    try:
        return transfer.cancel(seconds) is not TransferState.UNSETTLED
    except MoonpoolError:
        # Not in time. Who owns the memory is told so.
        return False
