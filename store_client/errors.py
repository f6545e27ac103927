# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a chunk, and with the master that knows where it is.

What concerns one chunk of a batch is in `Results.errors` and is not raised; what concerns the whole call is raised.
Refusals of the master are the errors of `moonpool.proto.errors`, all of them `MasterError`. Causes in the transfer
engine (`moonpool.transfer_engine.errors`) are quoted.
"""

from __future__ import annotations

from typing import Any

from moonpool.errors import MoonpoolError
from moonpool.proto.errors import AuthenticationError, MasterUnavailableError, TlsError
from moonpool.proto.errors import RemoteError as MasterError

__all__ = [
    "AuthenticationError",
    "ChunkBusyError",
    "ChunkConflictError",
    "ChunkCorruptError",
    "ChunkInUseError",
    "ChunkNotFoundError",
    "ChunkRangeError",
    "ChunkTooLargeError",
    "ClientClosedError",
    "ClusterChangedError",
    "IndexFullError",
    "MasterError",
    "MasterUnavailableError",
    "NoSpaceError",
    "NodeUnreachableError",
    "PutExpiredError",
    "SelfTestError",
    "StagingFullError",
    "StoreArgumentError",
    "StoreTimeoutError",
    "TlsError",
]


class StoreArgumentError(MoonpoolError, ValueError):
    """The call itself is wrong: hashes that are not 32 bytes each, shapes that do not fit."""

    default_code = "STORE_ARGUMENT"


class ChunkNotFoundError(MoonpoolError, KeyError):
    """There is no such chunk. Raised only by who asks for an exception: a miss is an outcome, not an error."""

    default_code = "CHUNK_NOT_FOUND"


class ChunkConflictError(MoonpoolError, ValueError):
    """The chunk is committed with another length or number of shards, or with other bytes under ``verify=True``."""

    default_code = "CHUNK_CONFLICT"


class ChunkBusyError(MoonpoolError, TimeoutError):
    """Somebody else was writing the chunk for as long as this put could wait."""

    default_code = "CHUNK_BUSY"


class ChunkInUseError(MoonpoolError, RuntimeError):
    """The chunk is pinned and cannot be removed."""

    default_code = "CHUNK_IN_USE"


class ChunkTooLargeError(MoonpoolError, ValueError):
    """The chunk is larger than every segment; or a range of it was asked for, and it is larger than `staging_bytes`."""

    default_code = "CHUNK_TOO_LARGE"


class ChunkRangeError(MoonpoolError, ValueError):
    """The range is not inside the chunk, or the chunk does not fit its destination."""

    default_code = "CHUNK_RANGE"


class ChunkCorruptError(MoonpoolError, ValueError):
    """What lies in the segment is not the chunk: its header or its digest is wrong. Nothing of it is to be used."""

    default_code = "CHUNK_CORRUPT"


class NoSpaceError(MoonpoolError, RuntimeError):
    """There was no room for the chunk, and eviction made none in time.

    Attributes:
        retry_after: seconds after which it is worth another try.
    """

    default_code = "NO_SPACE"

    def __init__(self, message: str, *, retry_after: float = 0.0, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after = retry_after


class IndexFullError(MoonpoolError, RuntimeError):
    """The master's index holds as many chunks as it may."""

    default_code = "INDEX_FULL"


class PutExpiredError(MoonpoolError, TimeoutError):
    """The put took longer than the master gave it, or the master no longer knew of it, until the time was over."""

    default_code = "PUT_EXPIRED"


class NodeUnreachableError(MoonpoolError, ConnectionError):
    """No node that has the chunk, or that could take it, can be reached."""

    default_code = "NODE_UNREACHABLE"


class ClusterChangedError(MoonpoolError, RuntimeError):
    """A master without memory of the old one answers now: where it said that something is means nothing any more.

    Seen by nobody but this client: puts start anew, gets are misses.
    """

    default_code = "CLUSTER_CHANGED"


class StoreTimeoutError(MoonpoolError, TimeoutError):
    """The time that the call was given was over before anything was begun."""

    default_code = "DEADLINE"


class StagingFullError(MoonpoolError, TimeoutError):
    """The staging area was full of other calls for as long as this one could wait."""

    default_code = "STAGING_FULL"


class ClientClosedError(MoonpoolError, RuntimeError):
    """The client or node was closed."""

    default_code = "CLIENT_CLOSED"


class SelfTestError(MoonpoolError, RuntimeError):
    """A node could not read back what it wrote into its own segment through its transfer engine."""

    default_code = "SELF_TEST"
