# SPDX-License-Identifier: Apache-2.0
"""Clients and nodes that the master knows. Used from the event loop only."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from google.protobuf.message import Message

from moonpool.master.errors import InvalidRequestError, LimitError, SessionUnknownError
from moonpool.proto import pool_pb2 as pb

__all__ = ["ID_BYTES", "PINS_MAX", "Outbox", "Session", "Sessions"]

ID_BYTES: Final = 16
#: Most pins of a session, of any number of chunks.
PINS_MAX: Final = 65_536
_NAME_MAX: Final = 255
_ENTRY_MAX: Final = 4096
#: Most entries of a roster that one session is told.
_ENTRIES_MAX: Final = 64


class Outbox:
    """What waits to be written to the stream of a session: orders, a bounded number of each kind per node."""

    def __init__(self) -> None:
        self._orders: list[dict[str, Message]] = []
        self.changed = asyncio.Event()
        self.closed = False

    def put(self, **order: Message) -> None:
        """Have something written: a field of HeartbeatReply by its name."""
        self._orders.append(order)
        self.changed.set()

    def close(self) -> None:
        """End the stream."""
        self.closed = True
        self.changed.set()

    def take(self) -> list[dict[str, Any]]:
        """Return what waits."""
        taken, self._orders = self._orders, []
        self.changed.clear()
        return taken


@dataclass(eq=False)
class Session:
    """One client or node, over any number of streams after each other.

    Attributes:
        id: 16 bytes, drawn by the other side.
        kind: client or node.
        name: for people.
        host_id: of its host.
        host: a number for that.
        incarnation: of its transfer engine: what nodes fence.
        owner: its number in the index; never given again by this master.
        seen_ms: when the last message came.
        roster: sessions with the same one are told of each other; empty: of none.
        entry: what they are told of this one.
        begin_until_ms: until then it may begin to write into what it was given.
        given_up: counts the moments at which writes of it were given up, so that a fence that was asked for before is
            not taken for one after.
        pins: what it holds: handle -> number of chunks.
        named: whether it has said what it held when this master came.
        naming: pins that it has named so far, while it is at it.
        outbox: of the stream that is open now; None: none is.
        ended: it is over; what it may still write has yet to be fenced.
        kept: done when the store knows it, which is before it is given anything to write, or a pin.
    """

    id: bytes
    kind: int
    name: str
    host_id: str
    host: int
    incarnation: bytes
    owner: int
    seen_ms: int
    roster: str = ""
    entry: bytes = b""
    begin_until_ms: int = 0
    given_up: int = 0
    pins: dict[int, int] = field(default_factory=dict)
    named: bool = False
    naming: set[int] = field(default_factory=set)
    outbox: Outbox | None = None
    ended: bool = False
    kept: Future[None] | None = None


class Sessions:
    """All sessions, by id and by owner.

    Args:
        maximum: how many there may be at once.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._owner = 0
        self.alive: dict[bytes, Session] = {}
        #: By owner; those that ended stay until everything of them is fenced.
        self.by_owner: dict[int, Session] = {}
        self.ended: dict[int, Session] = {}

    def get(self, session: bytes) -> Session:
        """Return a session that is alive.

        Raises:
            SessionUnknownError: there is none.
        """
        found = self.alive.get(session)
        if found is None:
            raise SessionUnknownError(
                "the session is not known: it ended, or the master was started again", retryable=True, hint="say Hello"
            )
        return found

    def new(self, hello: pb.Hello, host: int, now_ms: int) -> Session:
        """Make a session.

        Raises:
            LimitError: there are too many.
        """
        if len(self.by_owner) >= self._maximum:
            raise LimitError(
                f"there are {len(self.by_owner)} sessions already", retryable=True, hint="sessions_max of the master"
            )
        self._owner += 1
        made = Session(
            hello.session, hello.kind, hello.name, hello.host_id, host, hello.incarnation, self._owner, now_ms
        )
        self.alive[made.id] = self.by_owner[made.owner] = made
        return made

    def entries_beside(self, session: Session) -> list[bytes]:
        """Return the entries of the others in its roster."""
        if not session.roster:
            return []
        others = (one for one in self.alive.values() if one.roster == session.roster and one is not session)
        return [one.entry for one in islice(others, _ENTRIES_MAX)]

    def end(self, session: Session) -> None:
        """Take it from those that are alive."""
        session.ended = True
        self.ended[session.owner] = session
        if self.alive.get(session.id) is session:
            del self.alive[session.id]
        if session.outbox is not None:
            session.outbox.close()

    def forget(self, session: Session) -> None:
        """It has ended and nothing of it can write any more."""
        del self.by_owner[session.owner], self.ended[session.owner]


def check_hello(hello: pb.Hello) -> None:
    """See that a Hello makes sense.

    Raises:
        InvalidRequestError: it does not.
    """
    if len(hello.session) != ID_BYTES:
        raise InvalidRequestError(f"a session id of {len(hello.session)} bytes", hint="16 random bytes")
    if len(hello.incarnation) != ID_BYTES:
        raise InvalidRequestError(f"an incarnation of {len(hello.incarnation)} bytes", hint="16 bytes")
    if hello.kind not in (pb.CLIENT, pb.NODE):
        raise InvalidRequestError(f"a session of kind {hello.kind}", hint="CLIENT or NODE")
    if max(map(len, (hello.name, hello.host_id, hello.roster))) > _NAME_MAX:
        raise InvalidRequestError("a name, host id or roster is too long", hint=f"at most {_NAME_MAX} characters")
    if len(hello.entry) > _ENTRY_MAX:
        raise InvalidRequestError(
            f"an entry of {len(hello.entry)} bytes in a roster", hint=f"at most {_ENTRY_MAX} bytes"
        )
