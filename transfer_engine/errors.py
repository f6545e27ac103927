# SPDX-License-Identifier: Apache-2.0
"""Every way a transfer can fail: the outcomes of the native core and the exception each of them becomes.

Each exception is a `MoonpoolError` and also the builtin that a Python programmer would catch. The exception of a
failed transfer depends on its cause only, never on how far the transfer got:

* a cause that ends the whole transfer (peer lost, deadline, cancellation, engine closed) is raised as itself;
* a cause that concerns single items (out of range, region released, digest, ...) is raised as itself when the transfer
  has one item, and as `BatchError` when it has several, after the good items have finished.
"""

from __future__ import annotations

import enum
from typing import Final

from moonpool import _native
from moonpool.errors import AddressError, ConfigError, MoonpoolError

__all__ = [
    "AddressError",
    "ArgumentTypeError",
    "AuthenticationError",
    "BatchError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "CudaError",
    "DeadlineError",
    "DigestMismatchError",
    "ForkedError",
    "InternalError",
    "InvalidArgumentError",
    "LimitError",
    "ListenError",
    "MoonpoolError",
    "NotificationQueueFullError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PeerLostError",
    "ProtocolError",
    "RegionBusyError",
    "RegionNotFoundError",
    "RegionReadOnlyError",
    "RegionReleasedError",
    "RegionStaleError",
    "Status",
    "SystemCallError",
    "TransferCancelledError",
    "TransportUnavailableError",
    "VersionMismatchError",
    "WaitTimeoutError",
    "exception_type",
    "make_error",
]


class Status(enum.IntEnum):
    """The outcome of one item of a transfer, or of a call. The numbers are those of ``mp_status`` and of the wire."""

    OK = 0
    PENDING = 1
    INVALID_ARGUMENT = 2
    OUT_OF_RANGE = 3
    CONFIG = 4
    TRANSPORT_UNAVAILABLE = 5
    REGION_UNKNOWN = 6
    REGION_RELEASED = 7
    REGION_READ_ONLY = 8
    REGION_BUSY = 9
    REGION_STALE = 10
    ADDRESS = 11
    LISTEN = 12
    CONNECT = 13
    PEER_LOST = 14
    PROTOCOL = 15
    VERSION = 16
    AUTH = 17
    DEADLINE = 18
    CANCELLED = 19
    WAIT_TIMEOUT = 20
    DIGEST = 21
    NOTIFY_FULL = 22
    NO_MEMORY = 23
    LIMIT = 24
    CLOSED = 25
    FORKED = 26
    SYSTEM = 27
    INTERNAL = 28
    CUDA = 29


class InvalidArgumentError(MoonpoolError, ValueError):
    """The call itself is wrong: shapes that do not fit, a peer of another engine, a name that is taken."""

    default_code = "INVALID_ARGUMENT"


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that the call cannot use."""


class OutOfRangeError(MoonpoolError, ValueError):
    """A negative or zero length, an offset outside the region, or offset + length beyond its end."""

    default_code = "OUT_OF_RANGE"


class TransportUnavailableError(MoonpoolError, RuntimeError):
    """A transport asked for by name is unknown or missing here, or ``require`` cannot be met."""

    default_code = "TRANSPORT_UNAVAILABLE"


class RegionNotFoundError(MoonpoolError, KeyError):
    """The peer has announced no region of this name or key."""

    default_code = "REGION_UNKNOWN"


class RegionReleasedError(MoonpoolError, ValueError):
    """The region was there and its owner has released it."""

    default_code = "REGION_RELEASED"


class RegionReadOnlyError(MoonpoolError, PermissionError):
    """A write into a region that was registered with ``writable=False``."""

    default_code = "REGION_READ_ONLY"


class RegionBusyError(MoonpoolError, BufferError):
    """The region cannot be released yet: a transfer that is not settled owns its bytes."""

    default_code = "REGION_BUSY"


class RegionStaleError(MoonpoolError, LookupError):
    """The handle names a region of an earlier incarnation of the peer, which has been restarted since."""

    default_code = "REGION_STALE"


class ListenError(MoonpoolError, OSError):
    """The listening socket cannot be made."""

    default_code = "LISTEN"


class ConnectError(MoonpoolError, ConnectionError):
    """The peer refused, cannot be reached, or did not answer within the connect timeout."""

    default_code = "CONNECT"


class PeerLostError(MoonpoolError, ConnectionError):
    """The connection to the peer ended while work was outstanding, or has not come back."""

    default_code = "PEER_LOST"


class ProtocolError(MoonpoolError, ConnectionError):
    """The other side does not speak this protocol."""

    default_code = "PROTOCOL"


class VersionMismatchError(ProtocolError):
    """The other side speaks another version of this protocol."""

    default_code = "VERSION"


class AuthenticationError(MoonpoolError, PermissionError):
    """The cluster secrets of the two sides differ."""

    default_code = "AUTH"


class DeadlineError(MoonpoolError, TimeoutError):
    """The transfer's deadline or progress timeout passed. It has ended."""

    default_code = "DEADLINE"


class TransferCancelledError(MoonpoolError):
    """The transfer was cancelled."""

    default_code = "CANCELLED"


class WaitTimeoutError(MoonpoolError, TimeoutError):
    """The wait ended, the transfer did not: it still owns its buffers."""

    default_code = "WAIT_TIMEOUT"


class DigestMismatchError(MoonpoolError, ValueError):
    """Bytes arrived that are not the bytes that were sent."""

    default_code = "DIGEST"


class NotificationQueueFullError(MoonpoolError, BufferError):
    """The bytes are in place, but the peer's queue of notifications is at its bound."""

    default_code = "NOTIFY_FULL"


class OutOfMemoryError(MoonpoolError, MemoryError):
    """Memory could not be allocated."""

    default_code = "NO_MEMORY"


class LimitError(MoonpoolError, RuntimeError):
    """A documented bound was reached (regions, peers, items); the hint names the setting."""

    default_code = "LIMIT"


class ClosedError(MoonpoolError, RuntimeError):
    """The engine, peer or region handle was closed."""

    default_code = "CLOSED"


class ForkedError(MoonpoolError, RuntimeError):
    """An engine was used in a forked child. Only the process that opened it can use it."""

    default_code = "FORKED"


class SystemCallError(MoonpoolError, OSError):
    """An operating-system call failed; ``errno`` says how."""

    default_code = "SYSTEM"


class InternalError(MoonpoolError, RuntimeError):
    """A fault of the engine itself. Please report it with the message."""

    default_code = "INTERNAL"


class CudaError(MoonpoolError, RuntimeError):
    """The CUDA driver is missing, too old, or refused a call; the cause begins with its name for the error."""

    default_code = "CUDA"


class BatchError(MoonpoolError):
    """Some items of a transfer failed, each for its own reason. The items that were good have been transferred.

    ``__cause__`` is the exception of the first cause, and ``code`` its code.

    Attributes:
        statuses: one `Status` number per item, in the order of the batch (``bytes``, so an item costs one byte).
    """

    statuses: bytes = b""

    @property
    def failed(self) -> list[int]:
        """The indexes of the items that are not in place."""
        return [index for index, status in enumerate(self.statuses) if status != Status.OK]


#: The one table. `Status.OK` and `Status.PENDING` are no failures.
_EXCEPTIONS: Final[dict[int, type[MoonpoolError]]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.OUT_OF_RANGE: OutOfRangeError,
    Status.CONFIG: ConfigError,
    Status.TRANSPORT_UNAVAILABLE: TransportUnavailableError,
    Status.REGION_UNKNOWN: RegionNotFoundError,
    Status.REGION_RELEASED: RegionReleasedError,
    Status.REGION_READ_ONLY: RegionReadOnlyError,
    Status.REGION_BUSY: RegionBusyError,
    Status.REGION_STALE: RegionStaleError,
    Status.ADDRESS: AddressError,
    Status.LISTEN: ListenError,
    Status.CONNECT: ConnectError,
    Status.PEER_LOST: PeerLostError,
    Status.PROTOCOL: ProtocolError,
    Status.VERSION: VersionMismatchError,
    Status.AUTH: AuthenticationError,
    Status.DEADLINE: DeadlineError,
    Status.CANCELLED: TransferCancelledError,
    Status.WAIT_TIMEOUT: WaitTimeoutError,
    Status.DIGEST: DigestMismatchError,
    Status.NOTIFY_FULL: NotificationQueueFullError,
    Status.NO_MEMORY: OutOfMemoryError,
    Status.LIMIT: LimitError,
    Status.CLOSED: ClosedError,
    Status.FORKED: ForkedError,
    Status.SYSTEM: SystemCallError,
    Status.INTERNAL: InternalError,
    Status.CUDA: CudaError,
}

#: Causes that concern an item and leave the rest of its batch alone.
ITEM_STATUSES: Final = frozenset(
    {
        Status.INVALID_ARGUMENT,
        Status.OUT_OF_RANGE,
        Status.REGION_UNKNOWN,
        Status.REGION_RELEASED,
        Status.REGION_READ_ONLY,
        Status.REGION_STALE,
        Status.DIGEST,
    }
)


def exception_type(status: int) -> type[MoonpoolError]:
    """Return the exception class that a failed call or item of this `Status` raises."""
    return _EXCEPTIONS.get(status, InternalError)


def make_error(
    status: int,
    message: str,
    *,
    peer: str = "",
    path: str = "",
    cause: str = "",
    retryable: bool = False,
    hint: str = "",
    item: int | None = None,
    sys_errno: int = 0,
) -> MoonpoolError:
    """Build the exception for a status and the fields of ``mp_error``. The native wrapper raises what this returns."""
    if status == _native.WRONG_TYPE:
        return ArgumentTypeError(message, hint=hint, item=item)
    error = exception_type(status)(
        message, peer=peer, path=path, cause=cause, retryable=retryable, hint=hint, item=item
    )
    if sys_errno and isinstance(error, OSError):
        error.errno = sys_errno
    return error


_native.set_error_factory(make_error)
