# SPDX-License-Identifier: Apache-2.0
"""Moves of chunks to another segment: the master has nodes copy them, and this asks until they are there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import errors
from moonpool.store_client.packing import HASH_BYTES, some_hashes
from moonpool.store_client.results import Outcome, Results
from moonpool.store_client.rpc import last_wait

if TYPE_CHECKING:
    from moonpool.store_client.core import Core

__all__ = ["move", "segment_of"]

# What one call waits for at most; the master has a bound of its own. The next one goes on where it was.
_WAIT_MS: Final = 2000
_DONE: Final[dict[int, Outcome]] = {pb.OK: Outcome.OK, pb.ALREADY: Outcome.ALREADY, pb.NOT_FOUND: Outcome.MISS}


def segment_of(core: Core, node: str, deadline: float) -> int:
    """Return the segment of a node that has the largest piece of room.

    Raises:
        StoreArgumentError: there is no such node, or it takes nothing now.
        MasterUnavailableError: the master did not answer in time.
    """
    its = [
        one
        for one in core.segments.refresh(deadline)
        if one.node == node and one.state == pb.ACTIVE and one.medium == pb.DRAM
    ]
    if not its:
        raise errors.StoreArgumentError(f"there is no node {node!r} that takes chunks", hint="`moonpool ls` shows all")
    return max(its, key=lambda one: one.largest_free_bytes).segment


def move(core: Core, namespace: str, batches: list[bytes], segment: int, deadline: float) -> Results:
    """Move chunks. See `StoreClient.move`."""
    until = last_wait(deadline)
    statuses = b"".join(_move_batch(core, namespace, some, segment, until, deadline) for some in batches)
    outcomes = bytes(_DONE.get(status, Outcome.FAILED) for status in statuses)
    failed = {
        index: _failure(statuses[index], segment, index)
        for index, outcome in enumerate(outcomes)
        if outcome == Outcome.FAILED
    }
    return Results(outcomes, failed)


def _move_batch(core: Core, namespace: str, hashes: bytes, segment: int, until: float, deadline: float) -> bytes:
    found = bytearray([pb.WRITING]) * (len(hashes) // HASH_BYTES)
    left = list(range(len(found)))
    asked_before = False
    while left and (not asked_before or time.monotonic() < until):
        some = some_hashes(hashes, np.array(left, dtype=np.intp))
        wait_ms = max(0, min(_WAIT_MS, int((until - time.monotonic()) * 1000)))
        request = pb.MoveRequest(namespace=namespace, hashes=some, segment=segment, wait_ms=wait_ms)
        reply = core.call("Move", request, deadline)
        for place, status in zip(left, reply.statuses, strict=True):
            # What was under way when it was asked for the last time has come to its end meanwhile.
            found[place] = pb.OK if status == pb.ALREADY and asked_before else status
        left = [place for place in left if found[place] == pb.WRITING]
        asked_before = True
    return bytes(found)


def _failure(status: int, segment: int, item: int) -> MoonpoolError:
    if status == pb.NO_SPACE:
        return errors.NoSpaceError(
            f"there is no room in segment {segment}", item=item, retryable=True, hint="another segment, or evict there"
        )
    if status == pb.TOO_LARGE:
        return errors.ChunkTooLargeError(f"the chunk is larger than segment {segment}", item=item)
    if status == pb.WRITING:
        return errors.ChunkBusyError(
            "the chunk was not moved in time", item=item, retryable=True, hint="a longer timeout; it may move yet"
        )
    if status == pb.NOT_MOVED:
        return errors.NodeUnreachableError(
            "the chunk could not be copied, and is where it was", item=item, retryable=True, hint="the log of the node"
        )
    return errors.MasterError(f"the master answered {status} to a move", code="UNKNOWN_STATUS", item=item)
