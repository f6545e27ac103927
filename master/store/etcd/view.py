# SPDX-License-Identifier: Apache-2.0
"""Ranges of keys, all as of one moment."""

from __future__ import annotations

from typing import Final

from moonpool.master.errors import StoreUnavailableError
from moonpool.master.store.etcd.calls import Members, RefusedError

__all__ = ["View"]

_READ_S: Final = 30.0


class View:
    """What there is, as of the first range that is read. Used from one event loop.

    Args:
        members: of the etcd.
        what: is read, for people.
    """

    def __init__(self, members: Members, what: bytes) -> None:
        self._members = members
        self._what = what.decode()
        self._revision = 0

    async def range(self, key: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return keys from `key` up to `end`, with their values, in their order; at most `limit`, or all with 0.

        Raises:
            StoreUnavailableError: they cannot be read.
        """
        while True:
            request = self._members.rpc.RangeRequest(key=key, range_end=end, limit=limit, revision=self._revision)
            try:
                reply = await self._members.ask("Range", request, _READ_S)
            except RefusedError as error:
                if not error.compacted or not self._revision:
                    raise StoreUnavailableError(f"{self._what} cannot be read", cause=str(error)) from error
                # The moment is gone. Nobody has written since: only the leader does, and it reads before.
                self._revision = 0
                continue
            self._revision = self._revision or reply.header.revision
            return [(pair.key, pair.value) for pair in reply.kvs]
