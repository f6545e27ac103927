# SPDX-License-Identifier: Apache-2.0
"""Every way the master can fail. Those that callers meet are in `moonpool.proto.errors`, since they cross the wire."""

from __future__ import annotations

from moonpool.errors import MoonpoolError
from moonpool.proto.errors import (
    AuthenticationError,
    InvalidRequestError,
    LimitError,
    MasterClosedError,
    NotLeaderError,
    RemoteError,
    SegmentLostError,
    SegmentUnknownError,
    SessionUnknownError,
    StoreUnavailableError,
    UnsupportedError,
)

__all__ = [
    "AuthenticationError",
    "InvalidRequestError",
    "LimitError",
    "ListenError",
    "MasterClosedError",
    "NotLeaderError",
    "RemoteError",
    "SegmentLostError",
    "SegmentUnknownError",
    "SessionUnknownError",
    "StartError",
    "StoreBusyError",
    "StoreDamagedError",
    "StoreUnavailableError",
    "UnsupportedError",
]


class ListenError(MoonpoolError, OSError):
    """An address cannot be listened on."""

    default_code = "LISTEN"


class StartError(MoonpoolError, RuntimeError):
    """The master did not come up, or did not end, in time."""

    default_code = "START"


class StoreBusyError(MoonpoolError, BlockingIOError):
    """Another process has the metadata store open."""

    default_code = "STORE_BUSY"

    #: Address of the master that has it open, as far as it is known.
    leader: str = ""


class StoreDamagedError(MoonpoolError, OSError):
    """The metadata store is damaged, of another program or of a later version."""

    default_code = "STORE_DAMAGED"
