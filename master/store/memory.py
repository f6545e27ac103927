# SPDX-License-Identifier: Apache-2.0
"""A store that forgets with its process."""

from __future__ import annotations

import os
import secrets
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from moonpool.master.errors import StoreUnavailableError
from moonpool.master.store.base import EPOCH_MAX, Identity, MetadataStore, SegmentRow, Writer
from moonpool.master.store.packing import split_records

__all__ = ["MemoryStore"]


class MemoryStore(MetadataStore):
    """Keeps everything in this process, for tests and for pools whose content is not worth a disk.

    Args:
        keep_records: hold the records of chunks, so that it can be opened again as after a restart. A master keeps all
            of that in its index anyway and cannot restart from here, so it does without.
    """

    def __init__(self, *, keep_records: bool = True) -> None:
        self._lock = threading.Lock()
        self._cluster_id = os.urandom(16)
        # Another process that starts like this one must not give generations that nodes have seen.
        self._epoch = secrets.randbelow(EPOCH_MAX // 2)
        self._keep_records = keep_records
        self._records: dict[int, bytes] = {}
        self._segments: dict[int, SegmentRow] = {}
        self._segment_last = 0
        self._namespaces: dict[str, int] = {}
        self._writers: dict[bytes, Writer] = {}
        self._counts = {"writes": 0, "deletes": 0, "transactions": 0, "failures": 0, "waiting": 0}
        self._open = False

    def open(self, address: str = "") -> Identity:
        """Open it, also after `close`."""
        del address
        self._epoch += 1
        self._open = True
        return Identity(self._cluster_id, self._epoch)

    def segments(self) -> list[SegmentRow]:
        """Return every segment."""
        return [row for _, row in sorted(self._segments.items())]

    def namespaces(self) -> dict[str, int]:
        """Return the number of each namespace."""
        return dict(self._namespaces)

    def writers(self) -> list[Writer]:
        """Return every writer."""
        return list(self._writers.values())

    def load(self, page: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield every record."""
        slots = sorted(self._records)
        for first in range(0, len(slots), page):
            some = slots[first : first + page]
            yield array("I", some).tobytes(), b"".join(self._records[slot] for slot in some)

    def apply(self, slots: bytes, records: bytes, deletes: bytes) -> Future[None]:
        """Write and delete records."""
        return self._change(lambda: self._apply(slots, records, deletes))

    def _apply(self, slots: bytes, records: bytes, deletes: bytes) -> None:
        self._counts["writes"] += len(slots) // 4
        self._counts["deletes"] += len(deletes) // 4
        if not self._keep_records:
            return
        self._records.update(zip(memoryview(slots).cast("I"), split_records(records), strict=True))
        for (slot,) in struct.iter_unpack("<I", deletes):
            self._records.pop(slot, None)

    def new_segment(self) -> int:
        """Return a number that no segment has ever had."""
        return self._segment_last + 1

    def put_segment(self, row: SegmentRow) -> Future[None]:
        """Write a segment."""

        def put() -> None:
            self._segments[row.segment] = row
            self._segment_last = max(self._segment_last, row.segment)

        return self._change(put)

    def remove_segment(self, segment: int) -> Future[None]:
        """Remove a segment."""
        return self._change(lambda: self._segments.pop(segment, None))

    def put_namespace(self, name: str, number: int) -> Future[None]:
        """Name a namespace."""
        return self._change(lambda: self._namespaces.__setitem__(name, number))

    def put_writer(self, writer: Writer) -> Future[None]:
        """Remember a writer."""
        return self._change(lambda: self._writers.__setitem__(writer.session, writer))

    def remove_writers(self, sessions: list[bytes]) -> Future[None]:
        """Forget writers."""
        return self._change(lambda: [self._writers.pop(session, None) for session in sessions])

    def stats(self) -> dict[str, int]:
        """Return counters."""
        return {**self._counts, **{f"refused_{table}": 0 for table in ("segments", "namespaces", "writers", "chunks")}}

    def close(self) -> None:
        """Close it. What it holds stays for another `open`."""
        self._open = False

    def _change(self, change: Callable[[], object]) -> Future[None]:
        done: Future[None] = Future()
        with self._lock:
            if not self._open:
                self._counts["failures"] += 1
                done.set_exception(StoreUnavailableError("the metadata store is closed"))
                return done
            self._counts["transactions"] += 1
            change()
        done.set_result(None)
        return done
