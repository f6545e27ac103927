# SPDX-License-Identifier: Apache-2.0
"""Ranges of keys, all as of one moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from moonpool.master.errors import StoreUnavailableError
from moonpool.master.store.etcd.calls import Members, RefusedError
from moonpool.master.store.etcd.layout import Layout, end_of, number_of

__all__ = ["View"]

_READ_S: Final = 30.0


class View:
    """What there is, as of the first range that is read. Used from one event loop.

    Args:
        members: of the etcd.
        what: is read, for people.
        alone: nobody writes meanwhile, so where etcd has forgotten that moment, another one is as good.

    Attributes:
        revision: of that moment; 0: nothing was read yet.
    """

    def __init__(self, members: Members, what: bytes, *, alone: bool = True) -> None:
        self.revision = 0
        self._members = members
        self._what = what.decode()
        self._alone = alone

    async def range(self, key: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return keys from `key` up to `end`, with their values, in their order; at most `limit`, or all with 0.

        Raises:
            StoreUnavailableError: they cannot be read.
        """
        while True:
            request = self._members.rpc.RangeRequest(key=key, range_end=end, limit=limit, revision=self.revision)
            try:
                reply = await self._members.ask("Range", request, _READ_S)
            except RefusedError as error:
                if not error.compacted or not self.revision or not self._alone:
                    raise StoreUnavailableError(f"{self._what} cannot be read", cause=str(error)) from error
                self.revision = 0
                continue
            self.revision = self.revision or reply.header.revision
            return [(pair.key, pair.value) for pair in reply.kvs]

    async def pages(self, layout: Layout, page: int) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield the records of chunks, those of `page` slots at a time."""
        prefix = layout.chunks
        end, after = end_of(prefix), prefix
        while after < end:
            # Etcd counts all keys up to the end of a range, whatever the limit; so each range ends with its page.
            first = 0 if after == prefix else number_of(after)
            stop = end if first < 0 else layout.chunk(first + page) or end
            if found := await self.range(after, stop, 0):
                yield found
            elif stop < end and (found := await self.range(stop, end, 1)):
                stop = found[0][0]
            else:
                return
            after = stop
