# SPDX-License-Identifier: Apache-2.0
"""What happened lately, for those who watch. Used from the event loop only."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from moonpool.proto import pool_pb2 as pb

__all__ = ["Entry", "Events"]

_RECORD: Final = 36  # u32 namespace, 32 bytes of hash


@dataclass(frozen=True)
class Entry:
    """One change, packed as the index gave it; it is taken apart when somebody watches.

    Attributes:
        kind: of the event.
        records: u32 namespace and 32 bytes of hash, each.
        segment: which one changed.
        state: what it is now.
        descendants: and all that descend from them.
    """

    kind: pb.Event.Kind
    records: bytes = b""
    segment: int = 0
    state: pb.SegmentState = pb.ACTIVE
    descendants: bool = False

    @property
    def weight(self) -> int:
        """Chunks that it names, or 1."""
        return max(1, len(self.records) // _RECORD)


class Events:
    """A ring of the last changes. The cursor of a change is its number, from 1.

    Args:
        maximum: how many chunks those that are kept name in all; one without any counts as one.
        name_of: the text of a namespace's number.
    """

    def __init__(self, maximum: int, name_of: Callable[[int], str]) -> None:
        self.cursor = 0
        self._ring: deque[Entry] = deque()
        self._room = maximum
        self._name_of = name_of
        self._changed = asyncio.Event()

    def add(self, entry: Entry) -> None:
        """Add a change and wake those who watch."""
        self.cursor += 1
        self._ring.append(entry)
        self._room -= entry.weight
        # The newest stays, however much it names.
        while self._room < 0 and len(self._ring) > 1:
            self._room += self._ring.popleft().weight
        self.wake()

    def wake(self) -> None:
        """Have everybody who waits look."""
        self._changed.set()
        # A fresh one: those who waited hold the old one, which stays set.
        self._changed = asyncio.Event()

    @property
    def oldest(self) -> int:
        """The last change that is not kept any more."""
        return self.cursor - len(self._ring)

    def since(self, cursor: int) -> list[Entry] | None:
        """Return what came after a cursor; None: that is not known any more, or has never been."""
        if not self.oldest <= cursor <= self.cursor:
            return None
        # From the right end: a watcher that keeps up looks at the last few of many.
        ring = self._ring
        return [ring[place] for place in range(cursor - self.cursor, 0)]

    async def wait(self, cursor: int) -> None:
        """Wait until there may be something after a cursor."""
        if self.cursor == cursor:
            await self._changed.wait()

    def messages(self, entry: Entry, cursor: int, header: pb.Header) -> Iterator[pb.Event]:
        """Yield a change as messages: one for each namespace in it."""
        if entry.kind == pb.Event.SEGMENT:
            yield pb.Event(header=header, cursor=cursor, kind=entry.kind, segment=entry.segment, state=entry.state)
            return
        for namespace, hashes in _by_namespace(entry.records).items():
            yield pb.Event(
                header=header,
                cursor=cursor,
                kind=entry.kind,
                namespace=self._name_of(namespace),
                hashes=b"".join(hashes),
                descendants=entry.descendants,
            )


def _by_namespace(records: bytes) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for place in range(0, len(records), _RECORD):
        number = int.from_bytes(records[place : place + 4], "little")
        found.setdefault(number, []).append(records[place + 4 : place + _RECORD])
    return found
