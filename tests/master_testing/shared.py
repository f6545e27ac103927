# SPDX-License-Identifier: Apache-2.0
"""A store that several masters of this process share, with a lock that can be taken from its holder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

from moonpool.master.errors import StoreBusyError, StoreLostError
from moonpool.master.settings import MasterSettings
from moonpool.master.store import Identity, MemoryStore, MetadataStore, SegmentRow, Writer

__all__ = ["SharedPlace"]


class SharedPlace:
    """What the masters share."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.holder: _SharedStore | None = None
        self.leader = ""
        self.changed = threading.Condition()

    def store(self, name: str, settings: MasterSettings) -> MetadataStore:
        """Stand in for `open_store`."""
        assert name == settings.store == "memory"
        return _SharedStore(self)

    def take_away(self) -> None:
        """As when the lease of the holder runs out. Nobody else has it yet."""
        with self.changed:
            holder, self.holder = self.holder, None
            self.changed.notify_all()
        if holder is not None:
            holder.taken.set_result(StoreLostError("another master may lead"))


class _SharedStore(MetadataStore):
    shared = True

    def __init__(self, place: SharedPlace) -> None:
        self._place = place
        self._taken: Future[StoreLostError] = Future()

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
    def leading(self) -> bool:
        return self._place.holder is self

    @property
    def taken(self) -> Future[StoreLostError]:
        return self._taken

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

    def remove_namespaces(self, numbers: list[int]) -> Future[None]:
        return self._refused() or self._place.memory.remove_namespaces(numbers)

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
        done.set_exception(StoreLostError("another master has the store"))
        return done
