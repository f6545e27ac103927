# SPDX-License-Identifier: Apache-2.0
"""The last replies to each session, for calls that are made again because their reply was lost on the way.

Used from the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from moonpool.master.errors import InvalidRequestError
from moonpool.master.sessions import ID_BYTES, Session

__all__ = ["Replays"]

T = TypeVar("T", bound=Message)
# A client makes a call again within seconds, or not at all.
_CALLS_OF_A_SESSION: Final = 256
_BYTES_IN_ALL: Final = 64 << 20
# Beside the reply itself.
_BYTES_PER_REPLY: Final = 512


class Replays:
    """Carries out each request once, however often it comes.

    Attributes:
        bytes: that it takes, about.
    """

    def __init__(self, calls_of_a_session: int = _CALLS_OF_A_SESSION, bytes_in_all: int = _BYTES_IN_ALL) -> None:
        self._calls_max = calls_of_a_session
        self._bytes_max = bytes_in_all
        self._replies: OrderedDict[tuple[bytes, bytes], tuple[Message, int]] = OrderedDict()
        self._running: dict[tuple[bytes, bytes], asyncio.Future[None]] = {}
        #: Session -> its requests, in their order.
        self._calls: dict[bytes, OrderedDict[bytes, None]] = {}
        self.bytes = 0

    def once(self, session: Session, request: bytes, work: Callable[[], T]) -> T:
        """Return what `work` returns, or returned when this request came before.

        Raises:
            InvalidRequestError: the id of the request is none.
        """
        if not _named(request):
            return work()
        reply: T | None = self._find(session, request)
        if reply is None:
            reply = work()
            self._keep(session, request, reply)
        return reply

    async def once_later(self, session: Session, request: bytes, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the same for work that takes time. A request that comes again meanwhile waits for the first one.

        Work that fails, or is cancelled because its caller went away, is done anew by the next.

        Raises:
            InvalidRequestError: the id of the request is none.
        """
        if not _named(request):
            return await work()
        key = session.id, request
        while (running := self._running.get(key)) is not None:
            await asyncio.wait([running])
        reply: T | None = self._find(session, request)
        if reply is not None:
            return reply
        running = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            reply = await work()
            if not session.ended:
                self._keep(session, request, reply)
        finally:
            del self._running[key]
            running.set_result(None)
        return reply

    def forget(self, session: Session) -> None:
        """It is over: nobody asks for its replies."""
        for request in self._calls.pop(session.id, ()):
            self.bytes -= self._replies.pop((session.id, request))[1]

    def _find(self, session: Session, request: bytes) -> Any:
        found = self._replies.get((session.id, request))
        return None if found is None else found[0]

    def _keep(self, session: Session, request: bytes, reply: Message) -> None:
        size = reply.ByteSize() + _BYTES_PER_REPLY
        self._replies[session.id, request] = reply, size
        self.bytes += size
        calls = self._calls.setdefault(session.id, OrderedDict())
        calls[request] = None
        if len(calls) > self._calls_max:
            self._drop((session.id, next(iter(calls))))
        while self.bytes > self._bytes_max:
            self._drop(next(iter(self._replies)))

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        self.bytes -= self._replies.pop(key)[1]
        calls = self._calls[key[0]]
        del calls[key[1]]
        if not calls:
            del self._calls[key[0]]


def _named(request: bytes) -> bool:
    if len(request) not in (0, ID_BYTES):
        raise InvalidRequestError(f"a request id of {len(request)} bytes", hint="16 random bytes, or none")
    return bool(request)
