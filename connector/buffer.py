# SPDX-License-Identifier: Apache-2.0
"""Which chunks are in a bounded piece of host memory, and which of them go when others come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["Buffer", "Entry"]


class Entry:
    """A chunk in the buffer.

    Attributes:
        key: of the chunk.
        slot: where it is.
        users: who needs it. It stays while there are any.
        filled: its bytes are there.
        filling: one of its users is bringing them.
    """

    __slots__ = ("filled", "filling", "key", "slot", "users")

    def __init__(self, key: bytes, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.users = 0
        self.filled = False
        self.filling = False


class Buffer:
    """Chunks that somebody needs, and those that were needed last. Not thread-safe.

    When room is needed, what nobody needs goes, the chunk first that was needed longest ago.

    Args:
        slots: chunks that it has room for.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._entries: dict[bytes, Entry] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()

    @property
    def used(self) -> int:
        """How many chunks somebody needs."""
        return len(self._entries) - len(self._unused)

    def take(self, key: bytes) -> Entry | None:
        """Return the entry of a chunk, which stays until it is released; None: there is no room."""
        entry = self._entries.get(key)
        if entry is None:
            if not self._free:
                if not self._unused:
                    return None
                oldest, _ = self._unused.popitem(last=False)
                self._free.append(self._entries.pop(oldest).slot)
            entry = self._entries[key] = Entry(key, self._free.pop())
        elif not entry.users:
            del self._unused[key]
        entry.users += 1
        return entry

    def release(self, entries: Iterable[Entry]) -> None:
        """Somebody needs these no more."""
        for entry in entries:
            entry.users -= 1
            if entry.users:
                continue
            if entry.filled:
                self._unused[entry.key] = None
            else:
                del self._entries[entry.key]
                self._free.append(entry.slot)
