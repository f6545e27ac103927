# SPDX-License-Identifier: Apache-2.0
"""Errors that cross the wire: how each becomes a gRPC status, and how a status becomes the same error again.

The master answers a call that cannot be carried out with a gRPC status and an ``ErrorDetail`` in the trailing metadata
``moonpool-error-bin``. `from_rpc_error` gives the caller the exception that the master raised.
"""

from __future__ import annotations

import re
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2

__all__ = [
    "TRAILER",
    "AuthenticationError",
    "CallDeadlineError",
    "InvalidRequestError",
    "LimitError",
    "MasterClosedError",
    "MasterUnavailableError",
    "NotLeaderError",
    "RemoteError",
    "SegmentLostError",
    "SegmentUnknownError",
    "SessionUnknownError",
    "StoreUnavailableError",
    "TlsError",
    "UnsupportedError",
    "from_rpc_error",
    "status_of",
    "trailer_of",
]

#: The key of the trailing metadata.
TRAILER: Final = "moonpool-error-bin"


class RemoteError(MoonpoolError, RuntimeError):
    """The master failed in a way that it did not foresee, or answered with an error this version does not know."""

    default_code = "INTERNAL"

    #: When the same call may succeed, 0 if nobody knows; `retryable` says whether it may at all.
    retry_after_ms: int = 0


class InvalidRequestError(RemoteError, ValueError):
    """The request itself is wrong: sizes that do not fit each other, an impossible number, a text that is too long."""

    default_code = "INVALID_REQUEST"


class AuthenticationError(RemoteError, PermissionError):
    """Caller and master do not have the same secret, or their clocks differ too much."""

    default_code = "AUTHENTICATION"


class SessionUnknownError(RemoteError, ConnectionError):
    """The master knows no such session: it ended, or the master was started again. Say Hello once more."""

    default_code = "SESSION_UNKNOWN"


class SegmentUnknownError(RemoteError, KeyError):
    """There is no such segment."""

    default_code = "SEGMENT_UNKNOWN"


class SegmentLostError(RemoteError, KeyError):
    """The segment was given up, and its chunks with it. Its memory comes back only with another engine incarnation.

    Clients that nobody remembers may still be writing there. Closing the engine ends that.
    """

    default_code = "SEGMENT_LOST"


class LimitError(RemoteError, MemoryError):
    """A bound of the master is reached: sessions, segments, namespaces, items of a batch."""

    default_code = "LIMIT"


class StoreUnavailableError(RemoteError, OSError):
    """The metadata store did not take what had to be durable: the disk is full or broken. Nothing has changed."""

    default_code = "STORE"


class UnsupportedError(RemoteError, NotImplementedError):
    """This version of the master does not do that."""

    default_code = "UNSUPPORTED"


class MasterClosedError(RemoteError, ConnectionError):
    """The master is being stopped."""

    default_code = "CLOSED"


class MasterUnavailableError(RemoteError, ConnectionError):
    """The master cannot be reached. Whether it carried out the call is not known."""

    default_code = "UNAVAILABLE"


class NotLeaderError(MasterUnavailableError):
    """The master that was asked waits for its turn: another one leads. It has done nothing."""

    default_code = "NOT_LEADER"

    #: Address of the one that leads, as far as it is known; empty otherwise.
    leader: str = ""


class TlsError(RemoteError, ConnectionError):
    """Caller and master do not agree on TLS: only one has certificates, or one does not accept the other's."""

    default_code = "TLS"


class CallDeadlineError(RemoteError, TimeoutError):
    """No answer came in time. Whether the master carried out the call is not known."""

    default_code = "DEADLINE"


# Those that the master sends, each with the status that generic tools see.
_SENT: Final[dict[type[RemoteError], grpc.StatusCode]] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    SessionUnknownError: grpc.StatusCode.FAILED_PRECONDITION,
    SegmentUnknownError: grpc.StatusCode.NOT_FOUND,
    SegmentLostError: grpc.StatusCode.FAILED_PRECONDITION,
    LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    MasterClosedError: grpc.StatusCode.UNAVAILABLE,
    NotLeaderError: grpc.StatusCode.UNAVAILABLE,
    RemoteError: grpc.StatusCode.INTERNAL,
}
_BY_CODE: Final[dict[str, type[RemoteError]]] = {cls.default_code: cls for cls in _SENT}
# Trailing metadata is bounded by clients to 8 KiB; a cause may quote a request.
_TEXT_MAX: Final = 1000


def status_of(error: MoonpoolError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return next((status for cls, status in _SENT.items() if isinstance(error, cls)), grpc.StatusCode.INTERNAL)


def trailer_of(error: MoonpoolError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries an error."""
    detail = pool_pb2.ErrorDetail(
        code=error.code,
        message=error.message[:_TEXT_MAX],
        cause=error.cause[:_TEXT_MAX],
        hint=error.hint[:_TEXT_MAX],
        retryable=error.retryable,
        retry_after_ms=getattr(error, "retry_after_ms", 0),
        leader=getattr(error, "leader", ""),
    )
    return ((TRAILER, detail.SerializeToString()),)


def from_rpc_error(error: grpc.RpcError, attempted: str, master: str) -> RemoteError:
    """Return the exception for a failed call, of the synchronous and of the asyncio API.

    Args:
        error: what the call raised.
        attempted: what was attempted, such as ``"could not locate 32 chunks"``.
        master: whom it was asked of.
    """
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    text = (error.details() if hasattr(error, "details") else None) or str(code)
    detail = _detail(error)
    peer = f"master ({master})"
    if detail is not None:
        made = _BY_CODE.get(detail.code, RemoteError)(
            f"{attempted}: {detail.message}",
            code=detail.code,
            peer=peer,
            cause=detail.cause,
            hint=detail.hint,
            retryable=detail.retryable,
        )
        made.retry_after_ms = detail.retry_after_ms
        if isinstance(made, NotLeaderError):
            made.leader = detail.leader
        return made
    if code is grpc.StatusCode.UNAVAILABLE:
        return MasterUnavailableError(
            attempted, peer=peer, cause=_reason(text), retryable=True, hint=f"see that a master listens on {master}"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallDeadlineError(
            attempted, peer=peer, cause="no answer in time", retryable=True, hint="a longer timeout, or see its load"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        # gRPC itself refuses these, before the master has seen them.
        return InvalidRequestError(
            attempted, peer=peer, cause=text, hint="fewer items in one call: batch_max of the master"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError(attempted, peer=peer, cause=text, hint="a master of the same version")
    return RemoteError(attempted, peer=peer, cause=f"{code}: {text}", hint="the log of the master")


def _reason(text: str) -> str:
    """Return what people can read of the core's text: it lists every address with the same words around it."""
    found = re.search(r"(Connection refused|Connection reset by peer|No route to host|[Tt]imed? ?out|GOAWAY)", text)
    return found[1].lower() if found else text[:200]


def _detail(error: grpc.RpcError) -> pool_pb2.ErrorDetail | None:
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == TRAILER and isinstance(value, bytes):
            try:
                return pool_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None
