# SPDX-License-Identifier: Apache-2.0
"""Names of namespaces and their numbers, which chunks and records have. Used from the event loop only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from moonpool.master.errors import InvalidRequestError, LimitError, StoreUnavailableError

if TYPE_CHECKING:
    from moonpool.master.core import Core

__all__ = ["Namespaces"]

_NAME_BYTES_MAX: Final = 255


class Namespaces:
    """All that have a number. Those without a chunk are given back when there are as many as there may be.

    No number comes again under this master; under a later one it may, when no record has it.

    Attributes:
        numbers: by name.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.numbers = core.store.namespaces()
        #: Also of those that were given back, as long as an event may speak of them.
        self._names = {number: name for name, number in self.numbers.items()}
        #: The last event when one was given back, and its number.
        self._given_back: deque[tuple[int, int]] = deque()
        self._last = max(self._names, default=0)
        self._naming: dict[str, asyncio.Future[int]] = {}
        #: Calls that may put the first chunk into one: it is not given back meanwhile.
        self._putting: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.numbers)

    def name_of(self, number: int) -> str:
        """Return a name; empty: nobody knows it any more."""
        return self._names.get(number, "")

    @contextlib.asynccontextmanager
    async def put_into(self, name: str) -> AsyncIterator[int]:
        """Give the number of a namespace, a new one if need be, which is durable then. It keeps it meanwhile.

        Raises:
            InvalidRequestError: it is no name.
            LimitError: there are too many.
            StoreUnavailableError: it could not be kept, or none could be given back.
        """
        self._putting[name] += 1
        try:
            yield await self._named(name)
        finally:
            self._putting[name] -= 1
            if not self._putting[name]:
                del self._putting[name]

    async def _named(self, name: str) -> int:
        if name not in self.numbers and self._full:
            await self._give_back()
        known = self.numbers.get(name)
        if known is not None:
            return known
        if not name or len(name.encode()) > _NAME_BYTES_MAX:
            raise InvalidRequestError(
                f"a namespace of {len(name.encode())} bytes", hint=f"1 to {_NAME_BYTES_MAX} bytes"
            )
        naming = self._naming.get(name)
        if naming is None:
            if self._full:
                raise LimitError(
                    f"there are {len(self.numbers)} namespaces with chunks already", hint="namespaces_max of the master"
                )
            # Several may ask for it at once, and it has one number.
            naming = self._naming[name] = asyncio.ensure_future(self._name(name))
            naming.add_done_callback(lambda _: self._naming.pop(name))
        return await asyncio.shield(naming)

    async def _name(self, name: str) -> int:
        number = self._last = self._last + 1
        await self._core.durable(self._core.store.put_namespace(name, number))
        self.numbers[name], self._names[number] = number, name
        return number

    @property
    def _full(self) -> bool:
        return len(self.numbers.keys() | self._naming.keys()) >= self._core.settings.namespaces_max

    async def _give_back(self) -> None:
        core = self._core
        while self._given_back and self._given_back[0][0] <= core.events.oldest:
            del self._names[self._given_back.popleft()[1]]
        if core.sweep_round == 0 or core.waiting_for_store:
            return  # there may be a record of one, and no chunk
        used = set(memoryview(core.index.namespaces()).cast("I"))
        gone = {name: no for name, no in self.numbers.items() if no not in used and name not in self._putting}
        if not gone:
            return
        for name in gone:
            del self.numbers[name]
        try:
            await core.durable(core.store.remove_namespaces(list(gone.values())))
        except StoreUnavailableError:
            self.numbers = gone | self.numbers
            raise
        self._given_back.extend((core.events.cursor, number) for number in gone.values())
