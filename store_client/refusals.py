# SPDX-License-Identifier: Apache-2.0
"""What the master says when it refuses a chunk of a put, as errors."""

from __future__ import annotations

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import errors

__all__ = ["refusal"]


def refusal(status: int, retry_after: float, failure: MoonpoolError | None) -> MoonpoolError:
    """Return the error of a chunk that the master refused.

    Args:
        status: an ItemStatus of the protocol.
        retry_after: seconds, as the master said.
        failure: of a node, that this put has met before.
    """
    if status == pb.NO_SPACE:
        if failure is not None:
            return errors.NodeUnreachableError(
                "no node that could take the chunk can be reached", cause=str(failure), retryable=True
            )
        return errors.NoSpaceError(
            "there is no room in the pool, and eviction made none in time",
            retry_after=retry_after,
            retryable=True,
            hint=f"again after {retry_after:g}s, more nodes, or fewer pins",
        )
    if status == pb.CONFLICT:
        return errors.ChunkConflictError(
            "the chunk is there with another length or number of shards", hint="a hash that covers all of the value"
        )
    if status == pb.CHUNKS_MAX:
        return errors.IndexFullError("the master's index is full", retryable=True, hint="a larger chunks_max")
    if status == pb.TOO_LARGE:
        return errors.ChunkTooLargeError("the chunk is larger than every segment", hint="larger nodes")
    if status == pb.INVALID:
        return errors.StoreArgumentError("the master refused the chunk", hint="fewer shards, or a newer master")
    return errors.MasterError(f"the master answered {status} to a put", code="UNKNOWN_STATUS")
