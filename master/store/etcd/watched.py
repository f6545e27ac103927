# SPDX-License-Identifier: Apache-2.0
"""Whether somebody else leads, and is there."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from moonpool.master.errors import StoreBusyError

__all__ = ["Watched"]

# How long one is waited for that says nothing any more, beyond the time of its lease.
_GRACE: Final = 3.0
# What a renewal of a lease has to show, in seconds.
_MARGIN: Final = 0.2


class Watched:
    """Sees whether the leader that is waited for is there: one that is renews its lease.

    Args:
        read: returns the key of the leader, or None.
        left_of: returns how many whole seconds a lease has left.
    """

    def __init__(self, read: Callable[[], Awaitable[Any]], left_of: Callable[[int], Awaitable[float]]) -> None:
        self._read = read
        self._left_of = left_of
        self._lease = 0
        self._left = 0.0
        self._seen = 0.0

    async def look(self, end: float | None) -> None:
        """Raise StoreBusyError when it leads on and the time is over."""
        found = await self._read()
        if found is None or end is None:
            return
        left, now = await self._left_of(found.lease), time.monotonic()
        if found.lease != self._lease:
            self._lease, self._left, self._seen = found.lease, left, now
        # Etcd tells whole seconds, rounded down.
        renewed = left > 0 and left >= self._left + 1 - (now - self._seen) + _MARGIN
        if now >= end and (renewed or now >= self._seen + self._left + _GRACE):
            raise StoreBusyError(
                f"another master leads: {found.value.decode(errors='replace')}",
                cause="it has the key of the leader in etcd, and renews its lease",
                hint="stop that one, or another prefix or cluster",
            )
