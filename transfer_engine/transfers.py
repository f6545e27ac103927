# SPDX-License-Identifier: Apache-2.0
"""Transfers in flight, and batches prepared for many of them."""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, NoReturn

from moonpool import _native
from moonpool.transfer_engine.errors import (
    ITEM_STATUSES,
    ArgumentTypeError,
    BatchError,
    ForkedError,
    InternalError,
    MoonpoolError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from moonpool.transfer_engine._async import Waker

__all__ = ["Plan", "Transfer", "TransferState"]


class TransferState(enum.IntEnum):
    """Where a transfer is. The numbers are those of ``mp_transfer_state``."""

    RUNNING = 0
    #: Every item is in place at the destination.
    COMPLETED = 1
    #: At least one item failed; the others have their own status.
    FAILED = 2
    #: Cancelled, and nothing can write its buffers any more.
    STOPPED = 3
    #: Its deadline passed, and nothing can write its buffers any more.
    EXPIRED = 4
    #: Failed, cancelled or expired, but the far side may still write: the buffers stay owned. Becomes one of FAILED,
    #: STOPPED, EXPIRED once the far side is known to have stopped, or COMPLETED when its late answer says that all is
    #: in place.
    UNSETTLED = 5


_RUNNING: Final = int(TransferState.RUNNING)
_COMPLETED: Final = int(TransferState.COMPLETED)
_UNSETTLED: Final = int(TransferState.UNSETTLED)

_STILL_OWNED = "cancel() before the buffers are used again: the transfer still owns them and may still {verb} them"


class Plan(_native.Plan):
    """A batch that was checked once, for many posts: made by `TransferEngine.prepare`, used by `TransferEngine.post`.

    ``len(plan)`` is its number of items. It may be posted from several threads at once.
    """

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        raise ArgumentTypeError("a Plan cannot be made directly", hint="engine.prepare(...)")

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError("a Plan cannot be copied or pickled", hint="engine.prepare(...) in the other process")

    def __repr__(self) -> str:
        return f"<Plan of {len(self)} items with {self.peer!r}>"


class Transfer(_native.Transfer):
    """One batch on its way, made by `TransferEngine.read`, `TransferEngine.write` or `TransferEngine.post`.

    Until a transfer is settled it owns the bytes of its buffers: reading or changing them gives no defined result, and
    releasing one of its regions is refused. Dropping the last reference to a transfer does not stop it.

    ``await transfer`` works in any event loop and is the same as `wait`; when the awaiting task is cancelled the
    transfer goes on. It is an awaitable, not a coroutine: `asyncio.gather`, `asyncio.wait_for` and
    `asyncio.ensure_future` take it, `asyncio.create_task` does not.

    ``len(transfer)`` is its number of items. Thread-safe.
    """

    __slots__ = ("__weakref__", "_waker")

    _waker: Waker

    def __init__(self) -> None:
        raise ArgumentTypeError("a Transfer cannot be made directly", hint="engine.read(...) or engine.write(...)")

    def wait(self, timeout: float | None = None) -> Transfer:
        """Wait until the outcome is known, and return the transfer when every item is in place.

        Args:
            timeout: seconds; None: until the transfer ends, which its deadline guarantees. 0 only looks.

        Raises:
            WaitTimeoutError: it is still running and still owns its buffers.
            BatchError: some items of a batch failed, each for its own reason.
            MoonpoolError: it failed otherwise; see `moonpool.transfer_engine.errors`. When the text says that the
                buffers are still owned (state UNSETTLED), call `cancel` before using them again.
        """
        state = self._wait(timeout)
        if state == _COMPLETED:
            return self
        error = self._exception(state)
        # The answer to a transfer that was not settled may have come since, and it is known to be in place after all.
        if self._state_now() == _COMPLETED:
            return self
        try:
            raise error
        finally:
            # Its traceback has this frame: the two would keep each other, the transfer and its regions until the
            # garbage collector runs.
            del error

    def result(self, timeout: float | None = None) -> bytes:
        """Wait as `wait` does, and return one `Status` number per item: all of them are `Status.OK`.

        Raises:
            MoonpoolError: as `wait` does. `statuses` then says which items are in place.
        """
        return self.wait(timeout).statuses

    def done(self) -> bool:
        """Return whether the outcome is known. False: it is running."""
        return self._state_now() != _RUNNING

    def cancel(self, timeout: float | None = None) -> TransferState:
        """Stop the transfer, and return its state once nothing can write its buffers any more.

        It may have completed first: then the state is COMPLETED. On a transfer that has ended it returns at once, and
        on one that is UNSETTLED it waits until it is settled.

        Args:
            timeout: seconds; None: as long as it takes. That is at most the progress timeout where the peer answers or
                has ended; a peer whose process stands still may go on with a write when it is continued, and is waited
                for until then.

        Raises:
            WaitTimeoutError: not settled in time; the buffers are still owned. It stays cancelled: call again.
        """
        state = self._cancel(timeout)
        if state in (_RUNNING, _UNSETTLED):
            raise self._not_in_time("cancelled, but not settled in time")
        return TransferState(state)

    @property
    def state(self) -> TransferState:
        """Where the transfer is now."""
        return TransferState(self._state_now())

    @property
    def settled(self) -> bool:
        """Whether nothing can write its buffers any more, so that they may be used again."""
        return self._state_now() not in (_RUNNING, _UNSETTLED)

    @property
    def statuses(self) -> bytes:
        """One `Status` number per item as ``bytes``: ``transfer.statuses[3] == Status.OK``.

        ``numpy.frombuffer(transfer.statuses, dtype="uint8")`` looks at many at once.
        """
        return self._status_bytes()

    @property
    def digests(self) -> memoryview | None:
        """One unsigned 64-bit digest per item (see `digest`), 0 for items without one; None without ``digest=True``."""
        digests = self._digest_bytes()
        return None if digests is None else memoryview(digests).cast("Q")

    @property
    def error(self) -> MoonpoolError | None:
        """The exception that `wait` raises, or None while the transfer runs and when it has completed."""
        state = self._state_now()
        if state in (_RUNNING, _COMPLETED):
            return None
        error = self._exception(state)
        return None if self._state_now() == _COMPLETED else error

    def __await__(self) -> Generator[Any, None, Transfer]:
        # Imported late: asyncio takes longer to load than all of the engine.
        from moonpool.transfer_engine._async import ended

        if not self.done():
            yield from ended(self).__await__()
        return self.wait(0.0)

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a Transfer cannot be copied or pickled", hint="its transfer.statuses, which are bytes, or transfer.error"
        )

    def __repr__(self) -> str:
        op = "read" if self._op == _native.READ else "write"
        try:
            state = self.state.name.lower()
        except ForkedError:
            state = "unknown"
        return f"<Transfer {op} of {len(self)} items, {state}, {self.peer!r}>"

    def _exception(self, state: int) -> MoonpoolError:
        if state == _RUNNING:
            return self._not_in_time("the transfer did not end in time")
        cause = self._failure()
        if not isinstance(cause, MoonpoolError):
            return InternalError(f"the transfer ended as {TransferState(state).name} without a cause")
        if state == _UNSETTLED:
            cause.hint = self._still_owned()
        statuses = self.statuses
        if len(statuses) == 1 or ITEM_STATUSES.isdisjoint(statuses):
            return cause
        return self._batch_error(statuses, cause)

    def _batch_error(self, statuses: bytes, cause: MoonpoolError) -> BatchError:
        error = BatchError(
            f"{len(statuses) - statuses.count(0)} of {len(statuses)} items failed",
            peer=cause.peer,
            path=cause.path,
            code=cause.code,
            cause=cause.message,
            retryable=cause.retryable,
            hint=cause.hint,
            item=cause.item,
        )
        error.statuses = statuses
        error.__cause__ = cause
        return error

    def _not_in_time(self, message: str) -> WaitTimeoutError:
        return WaitTimeoutError(message, peer=self.peer._label(), retryable=True, hint=self._still_owned())

    def _still_owned(self) -> str:
        return _STILL_OWNED.format(verb="write" if self._op == _native.READ else "read")
