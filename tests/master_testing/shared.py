# SPDX-License-Identifier: Apache-2.0
"""A store that several masters of this process share, with a lock that can be taken from its holder."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from moonpool.master.errors import StoreBusyError, StoreUnavailableError
from moonpool.master.store import Identity, MemoryStore, MetadataStore, SegmentRow, Writer

__all__ = ["SharedPlace"]


class SharedPlace:
    """What the masters share."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.holder: _SharedStore | None = None
        self.leader = ""
        self.changed = threading.Condition()

    def store(self, name: str) -> MetadataStore:
        """Stand in for `open_store`."""
        assert name == "memory"
        return _SharedStore(self)

    def take_away(self) -> None:
        """As when the lease of the holder runs out. Nobody else has it yet."""
        with self.changed:
            self.holder = None
            self.changed.notify_all()


class _SharedStore(MetadataStore):
    shared = True

    def __init__(self, place: SharedPlace) -> None:
        self._place = place

    def open(self, address: str = "") -> Identity:
        place = self._place
        with place.changed:
            if place.holder is not None:
                busy = StoreBusyError("another master leads", retryable=True)
                busy.leader = place.leader
                raise busy
            place.holder, place.leader = self, address
            return place.memory.open()

    def wait_for_turn(self, seconds: float) -> None:
        with self._place.changed:
            self._place.changed.wait_for(lambda: self._place.holder is None, seconds)

    @property
    def valid_until(self) -> float:
        return math.inf if self._place.holder is self else 0.0

    def segments(self) -> list[SegmentRow]:
        return self._place.memory.segments()

    def namespaces(self) -> dict[str, int]:
        return self._place.memory.namespaces()

    def writers(self) -> list[Writer]:
        return self._place.memory.writers()

    def load(self, page: int) -> Iterator[tuple[bytes, bytes]]:
        return self._place.memory.load(page)

    def new_segment(self) -> int:
        return self._place.memory.new_segment()

    def apply(self, slots: bytes, records: bytes, deletes: bytes) -> Future[None]:
        return self._refused() or self._place.memory.apply(slots, records, deletes)

    def put_segment(self, row: SegmentRow) -> Future[None]:
        return self._refused() or self._place.memory.put_segment(row)

    def remove_segment(self, segment: int) -> Future[None]:
        return self._refused() or self._place.memory.remove_segment(segment)

    def put_namespace(self, name: str, number: int) -> Future[None]:
        return self._refused() or self._place.memory.put_namespace(name, number)

    def put_writer(self, writer: Writer) -> Future[None]:
        return self._refused() or self._place.memory.put_writer(writer)

    def remove_writers(self, sessions: list[bytes]) -> Future[None]:
        return self._refused() or self._place.memory.remove_writers(sessions)

    def stats(self) -> dict[str, int]:
        return self._place.memory.stats()

    def close(self) -> None:
        if self._place.holder is self:
            self._place.take_away()

    def _refused(self) -> Future[None] | None:
        if self._place.holder is self:
            return None
        done: Future[None] = Future()
        done.set_exception(StoreUnavailableError("another master has the store"))
        return done
