# SPDX-License-Identifier: Apache-2.0
"""Puts: start, write, commit; what fails is placed elsewhere in the same call."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import errors
from moonpool.store_client.leaves import DIGEST_BYTES, leaves_of
from moonpool.store_client.moves import Moved
from moonpool.store_client.packing import (
    DIGEST_WORD,
    HASH_BYTES,
    HEADER_BYTES,
    NO_RANGES,
    NO_SEGMENT,
    Records,
    extents_of,
    hash_matrix,
    headers_of,
    ranges_with,
    some_hashes,
)
from moonpool.store_client.refusals import refusal
from moonpool.store_client.results import Outcome, Results
from moonpool.store_client.rpc import last_wait
from moonpool.transfer_engine import combine_batch, copy_batch

if TYPE_CHECKING:
    from moonpool.store_client.core import Core
    from moonpool.store_client.moves import Parts
    from moonpool.store_client.values import Memory, Piece

__all__ = ["PutRequest", "put"]

_PENDING: Final = 255
# Between two looks at a chunk that somebody else is writing.
_LOOK_FIRST: Final = 0.005
_LOOK_LAST: Final = 0.1
# Where there is no room but in segments that failed, those are tried again so often.
_FORGIVE: Final = 0.5
# Of the time that the master gives for a put, what is left for the commit.
_FOR_COMMIT: Final = 0.2


@dataclass
class PutRequest:
    """The arguments of a put, checked."""

    namespace: str
    hashes: bytes
    parents: bytes
    memory: Memory
    shard: int
    shards: int
    replicas: int
    deadline: float
    outcomes: npt.NDArray[np.uint8] = field(init=False)
    copies: npt.NDArray[np.uint8] = field(init=False)
    errors: dict[int, MoonpoolError] = field(default_factory=dict)
    #: Generations of what is there by now, those of the last call to the master apart.
    ranges: npt.NDArray[np.uint64] = field(default_factory=lambda: NO_RANGES)
    found: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    #: Once a chunk has found no room: the seconds after which the master says to try again. The rest waits for none.
    no_room: float | None = None

    def __post_init__(self) -> None:
        #: Each chunk is the parent of the next one: without it, that is of no use.
        self.is_chain = bool(self.parents) and self.parents[HASH_BYTES:] in (b"", self.hashes[:-HASH_BYTES])
        self.outcomes = np.full(self.memory.count, _PENDING, dtype=np.uint8)
        self.copies = np.zeros(self.memory.count, dtype=np.uint8)

    def hashes_of(self, items: npt.NDArray[np.intp]) -> bytes:
        """Return the packed hashes of some chunks."""
        return some_hashes(self.hashes, items)

    def parents_of(self, items: npt.NDArray[np.intp]) -> bytes:
        """Return the parents of some chunks, as PutStart takes them."""
        if not self.parents or len(items) == self.memory.count:
            return self.parents
        if len(self.parents) == HASH_BYTES:
            # Only in one piece can a chain be told by its first parent.
            self.parents = self.parents + self.hashes[:-HASH_BYTES]
        return some_hashes(self.parents, items)

    def spared(self) -> bytes:
        """Return the generations of what is there by now, as PutStart takes them: it is not evicted for the rest."""
        if self.found:
            self.ranges = ranges_with(self.ranges, np.concatenate(self.found))
            self.found.clear()
        return self.ranges.astype("<u8").tobytes()

    def fail(self, item: int, error: MoonpoolError) -> None:
        """This chunk has failed for good."""
        error.item = item
        self.outcomes[item] = Outcome.FAILED
        self.errors[item] = error


def put(core: Core, request: PutRequest) -> Results:
    """Put a batch. See `StoreClient.put`."""
    memory = request.memory
    every = np.arange(memory.count)
    try:
        for rows in memory.pieces(every, memory.lengths, core.settings.batch_chunks, core.piece_bytes(memory)):
            if request.is_chain and request.no_room is not None:
                for item in every[rows].tolist():
                    request.fail(item, refusal(pb.NO_SPACE, request.no_room, None))
            else:
                _Piecewise(core, request, every[rows]).run()
    finally:
        # A place that was kept may be that of a chunk that was there before.
        core.locations.forget(request.namespace, request.hashes)
    outcomes = request.outcomes.tobytes()
    core.count(
        puts=outcomes.count(Outcome.OK),
        puts_already=outcomes.count(Outcome.ALREADY),
        puts_failed=outcomes.count(Outcome.FAILED),
    )
    return Results(outcomes, request.errors, request.copies.tobytes())


class _Piecewise:
    """One piece of a put, from its first start to its last commit."""

    def __init__(self, core: Core, request: PutRequest, items: npt.NDArray[np.intp]) -> None:
        self._core = core
        self._request = request
        self._items = items
        self._pending = np.arange(len(items))  # rows of the piece
        self._piece: Piece | None = None
        self._leaves = leaves_of(request.memory.lengths[items])
        # One for each leaf of the piece, and for each row whether they are known.
        self._digests = np.zeros(len(self._leaves.owners), dtype="<u8")
        self._digested = np.zeros(len(items), dtype=np.bool_)
        self._look = _LOOK_FIRST
        # From the first time that there is no room. Until then the master may have been away.
        self._space_until: float | None = None if request.no_room is None else 0.0
        # What is granted after a wait for room has to be written yet.
        self._last_wait = last_wait(request.deadline)
        self._failure: MoonpoolError | None = None  # of a node, the last one
        self._forgive_at = 0.0

    def run(self) -> None:
        try:
            while len(self._pending):
                if time.monotonic() >= self._request.deadline:
                    self._out_of_time()
                    return
                self._attempt()
        finally:
            if self._piece is not None:
                self._core.give_back(self._piece)

    def _attempt(self) -> None:
        avoid = self._core.segments.avoided()
        sent = time.monotonic()
        rows = self._pending
        reply = self._start(rows, avoid)
        statuses = np.frombuffer(reply.statuses, dtype=np.uint8)
        granted = statuses == pb.OK
        extents = extents_of(reply.extents, len(rows), max(1, reply.replicas))
        there = granted | (statuses == pb.ALREADY)
        self._request.found.append(extents["generation"][there].max(axis=1))
        done = np.zeros(len(rows), dtype=np.bool_)
        if granted.any():
            # After begin_ms the master may have this client fenced, and its engine would go on over a new connection.
            allowed = [reply.deadline_ms / 1000 * (1 - _FOR_COMMIT)]
            allowed += [reply.begin_ms / 1000] if reply.begin_ms else []
            deadline = min(self._request.deadline, sent + min(allowed))
            done[granted] = self._write_and_commit(
                rows[granted], extents[granted], reply.header.cluster_id.hex(), deadline
            )
        done |= self._refused(rows, statuses, granted, reply.retry_after_ms / 1000, avoid)
        self._pending = rows[~done]
        if len(self._pending) and not granted.any():
            self._core.closed.wait(min(self._look, max(0.0, self._request.deadline - time.monotonic())))
            self._look = min(2 * self._look, _LOOK_LAST)

    def _start(self, rows: npt.NDArray[np.intp], avoid: list[int]) -> Any:
        request, items = self._request, self._items[rows]
        lengths = request.memory.lengths[items]
        one = (lengths == lengths[0]).all()
        now = time.monotonic()
        until = now + self._core.settings.space_wait if self._space_until is None else self._space_until
        wait = max(0.0, min(until, self._last_wait) - now)
        message = pb.PutStartRequest(
            session=self._core.session.id,
            namespace=request.namespace,
            hashes=request.hashes_of(items),
            parents=request.parents_of(items),
            lengths=(lengths[:1] if one else lengths).astype("<u8").tobytes(),
            shard=request.shard,
            shards=request.shards,
            replicas=request.replicas,
            avoid=avoid,
            wait_ms=int(wait * 1000),
            spared=request.spared(),
        )
        return self._core.call("PutStart", message, request.deadline)

    # ---------------------------------------------------------------- what was not granted

    def _refused(
        self,
        rows: npt.NDArray[np.intp],
        statuses: npt.NDArray[np.uint8],
        granted: npt.NDArray[np.bool_],
        retry_after: float,
        avoid: list[int],
    ) -> npt.NDArray[np.bool_]:
        """Return which rows are done with: they are there already, or never will be."""
        already = (statuses == pb.ALREADY) & ~self._renewed(rows, statuses)
        self._request.outcomes[self._items[rows[already]]] = Outcome.ALREADY
        finished: npt.NDArray[np.bool_] = already.copy()
        waiting = (statuses == pb.ALREADY) | (statuses == pb.WRITING)
        if (granted | waiting).all():
            return finished
        if self._space_until is None and (statuses == pb.NO_SPACE).any():
            # The master has waited for some of it already.
            self._space_until = min(time.monotonic() + self._core.settings.space_wait, self._last_wait)
        for index in np.flatnonzero(~granted & ~waiting).tolist():
            status = int(statuses[index])
            if status == pb.NO_SPACE and self._space_until is not None and time.monotonic() < self._space_until:
                continue
            if status == pb.NO_SPACE:
                self._request.no_room = retry_after
            self._request.fail(int(self._items[rows[index]]), refusal(status, retry_after, self._failure))
            finished[index] = True
        if avoid and time.monotonic() >= self._forgive_at:
            # The segments that are avoided may be the only ones with room, and well again.
            self._forgive_at = time.monotonic() + _FORGIVE
            self._core.segments.forgive(avoid)
        return finished

    def _renewed(self, rows: npt.NDArray[np.intp], statuses: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return the rows that are there, but were found spoilt by this client. They are removed, to be put again."""
        renewed = np.zeros(len(rows), dtype=np.bool_)
        there = np.flatnonzero(statuses == pb.ALREADY)
        if not len(there) or not self._core.any_spoilt:
            return renewed
        packed = self._request.hashes_of(self._items[rows[there]])
        hashes = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
        spoilt = self._core.take_spoilt(self._request.namespace, hashes)
        if spoilt:
            # Whatever somebody else has put under this hash since is of another generation, and stays.
            message = pb.RemoveRequest(
                namespace=self._request.namespace,
                hashes=b"".join(spoilt),
                generations=np.array(list(spoilt.values()), dtype="<u8").tobytes(),
            )
            statuses_of = self._core.call("Remove", message, self._request.deadline).statuses
            removed = {one for one, status in zip(spoilt, statuses_of, strict=True) if status != pb.IN_USE}
            for one in spoilt.keys() - removed:
                self._core.spoilt(self._request.namespace, one, spoilt[one])
            renewed[there] = [one in removed for one in hashes]
        return renewed

    def _out_of_time(self) -> None:
        for item in self._items[self._pending].tolist():
            error: MoonpoolError
            if self._failure is not None:
                error = errors.NodeUnreachableError(
                    "no node took the chunk in time", cause=str(self._failure), retryable=True
                )
            else:
                error = errors.ChunkBusyError(
                    "the chunk was being written by somebody else until the time was over", retryable=True
                )
            self._request.fail(item, error)

    # ---------------------------------------------------------------- what was granted

    def _prepared(self) -> Piece:
        if self._piece is None:
            memory, staging = self._request.memory, self._core.staging
            lengths = memory.lengths[self._items]
            piece = self._piece = memory.place(staging, self._items, lengths, self._request.deadline)
            memory.load(staging, piece)
        return self._piece

    def _write_and_commit(
        self, rows: npt.NDArray[np.intp], extents: Records, cluster: str, deadline: float
    ) -> npt.NDArray[np.bool_]:
        generations = extents["generation"].max(axis=1)
        try:
            written, settled = self._write(rows, extents, cluster, deadline)
        except BaseException:
            # No room in staging, Ctrl-C, or the client is being closed.
            if self._core.same_cluster(cluster):
                jobs = [] if self._piece is None else self._piece.slice_.jobs
                self._abort(rows, generations, settled=all(job.settled for job in jobs))
            raise
        done = np.zeros(len(rows), dtype=np.bool_)
        if not self._core.same_cluster(cluster):
            # The master of these extents has gone for good, and they with it: start anew.
            return done
        good = written != 0
        if not good.all():
            self._abort(rows[~good], generations[~good], settled)
        if good.any():
            full = (1 << (extents["segment"] != NO_SEGMENT).sum(axis=1)) - 1
            done[good] = self._commit(rows[good], generations[good], written[good], full[good], cluster)
        return done

    def _write(
        self, rows: npt.NDArray[np.intp], extents: Records, cluster: str, deadline: float
    ) -> tuple[npt.NDArray[np.uint8], bool]:
        """Write all replicas. Returns (a bit for each that is in place; whether nothing can write any more)."""
        place = self._prepared().place
        first = extents.copy()[:, 0]
        first["generation"] = extents["generation"].max(axis=1)
        first["length"] = extents["length"].max(axis=1)
        if (first["length"] != place.lengths[rows]).any():
            raise errors.MasterError("the master gave room of another length than was asked for")
        # All replicas at once: they are different segments, mostly on different hosts. Payloads go first: whoever moves
        # them computes the digests on the way, and no header is there before what it speaks of.
        which, replica = np.nonzero(extents["segment"] != NO_SEGMENT)
        payloads = self._write_parts("payloads", rows[which], extents[which, replica], cluster, deadline)
        which, replica = which[payloads.good], replica[payloads.good]
        self._fill_headers(rows, first)
        whole = self._write_parts("headers", rows[which], extents[which, replica], cluster, deadline)
        which, replica = which[whole.good], replica[whole.good]
        written = np.zeros(len(rows), dtype=np.uint8)
        np.bitwise_or.at(written, which, (1 << replica).astype(np.uint8))
        return written, payloads.settled and whole.settled

    def _write_parts(
        self, parts: Parts, rows: npt.NDArray[np.intp], extents: Records, cluster: str, deadline: float
    ) -> Moved:
        """Write payloads or headers of these rows of the piece into these extents; blame segments that fail."""
        core, piece = self._core, self._prepared()
        place = piece.place
        wanted = parts == "payloads" and not self._digested[rows].all()
        jobs = core.start_moves("write", place, rows, extents, cluster, deadline, wanted, piece.slice_.jobs, parts)
        if wanted:
            # What devices move, or lies in spans, is looked at here meanwhile.
            for job in jobs:
                if not job.digesting:
                    self._digest(rows[job.rows])
        moved = Moved(np.zeros(len(rows), dtype=np.bool_))
        for job in jobs:
            part = core.finish(job, place)
            moved.good[job.rows] = part.good
            moved.settled &= part.settled
            if part.digests is not None:
                moving = rows[job.rows]
                good = np.repeat(part.good, self._leaves.counts[moving])
                self._digests[self._leaves.of(moving)[good]] = part.digests[good]
                self._digested[moving[part.good]] = True
            if job.error is not None and core.same_cluster(cluster):
                self._failure = job.error
                if job.blamed:
                    core.failed(job.segment, cluster, job.error)
        if wanted:
            self._digest(rows[moved.good])
        return moved

    def _digest(self, rows: npt.NDArray[np.intp]) -> None:
        """Compute those digests of leaves of rows that are not known."""
        rows = rows[~self._digested[rows]]
        if not len(rows):
            return
        place, leaves = self._prepared().place, self._leaves
        which = leaves.of(rows)
        offsets = place.offsets[leaves.owners[which]] + leaves.starts[which]
        self._digests[which] = self._core.digests(place, offsets, leaves.lengths[which])
        self._digested[rows] = True

    def _fill_headers(self, rows: npt.NDArray[np.intp], extents: Records) -> None:
        """Make the headers of rows, and the tables of their leaves."""
        staging, place, leaves = self._core.staging, self._prepared().place, self._leaves
        tables = DIGEST_BYTES * leaves.firsts[rows], DIGEST_BYTES * leaves.counts[rows]
        digests = np.frombuffer(combine_batch(self._digests, *tables), dtype="<u8")
        hashes = hash_matrix(self._request.hashes_of(self._items[rows]))
        headers = headers_of(extents, hashes, self._request.shard)
        headers[:, DIGEST_WORD] = digests
        copy_batch(
            staging.region, place.header_offsets[rows], headers, HEADER_BYTES * np.arange(len(rows)), HEADER_BYTES
        )
        several = leaves.counts[rows] > 1
        if several.any():
            copy_batch(
                staging.region, place.table_offsets[rows[several]], self._digests, *(part[several] for part in tables)
            )

    def _commit(
        self,
        rows: npt.NDArray[np.intp],
        generations: npt.NDArray[np.uint64],
        written: npt.NDArray[np.uint8],
        full: npt.NDArray[Any],
        cluster: str,
    ) -> npt.NDArray[np.bool_]:
        request, items = self._request, self._items[rows]
        message = pb.PutCommitRequest(
            session=self._core.session.id,
            namespace=request.namespace,
            hashes=request.hashes_of(items),
            generations=generations.astype("<u8").tobytes(),
            shard=request.shard,
            written=b"" if (written == full).all() else written.tobytes(),
        )
        # The time may be over: the bytes are there, so a moment more is well spent.
        deadline = max(request.deadline, time.monotonic() + 1.0)
        reply = self._core.call("PutCommit", message, deadline)
        if reply.header.cluster_id.hex() != cluster:
            # Whatever this master has under such a generation, it is not what was written.
            return np.zeros(len(rows), dtype=np.bool_)
        statuses = np.frombuffer(reply.statuses, dtype=np.uint8)
        # ALREADY: committed under this very generation, by an attempt of this call whose answer was lost.
        done: npt.NDArray[np.bool_] = (statuses == pb.OK) | (statuses == pb.ALREADY)
        request.outcomes[items[done]] = Outcome.OK
        request.copies[items[done]] = np.unpackbits(written[done][:, None], axis=1).sum(axis=1)
        for index in np.flatnonzero(statuses == pb.CONFLICT).tolist():
            request.fail(int(items[index]), refusal(pb.CONFLICT, 0.0, None))
            done[index] = True
        return done

    def _abort(self, rows: npt.NDArray[np.intp], generations: npt.NDArray[np.uint64], settled: bool) -> None:
        message = pb.PutAbortRequest(
            session=self._core.session.id,
            namespace=self._request.namespace,
            hashes=self._request.hashes_of(self._items[rows]),
            generations=generations.astype("<u8").tobytes(),
            shard=self._request.shard,
            settled=settled,
        )
        try:
            self._core.call("PutAbort", message, max(self._request.deadline, time.monotonic() + 1.0))
        except MoonpoolError as error:
            # The master gives it up by itself when its time is over, and has the nodes fence this client.
            self._failure = self._failure or error
