# SPDX-License-Identifier: Apache-2.0
"""Gets: locate, read, and believe nothing that the header, the digest and the lease do not confirm."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client import errors
from moonpool.store_client.leaves import proved
from moonpool.store_client.packing import (
    DIGEST_WORD,
    NO_SEGMENT,
    Headers,
    Int64s,
    Records,
    extents_of,
    hash_matrix,
    headers_match,
    headers_of,
    some_hashes,
)
from moonpool.store_client.results import GetResults, Outcome
from moonpool.store_client.rpc import MasterIdentity, last_wait

if TYPE_CHECKING:
    from moonpool.store_client.core import Core, Job
    from moonpool.store_client.moves import Moved, Place
    from moonpool.store_client.values import Memory, Piece

__all__ = ["GetRequest", "get"]

# numpy takes an enumeration for an object to be asked about itself, at every use.
_OK: Final = int(Outcome.OK)
_MISS: Final = int(Outcome.MISS)
_CORRUPT: Final = int(Outcome.CORRUPT)
# Where a replica is read from: never tried again, spoilt a moment ago, rather not, farther away.
_TRIED: Final = 1000
_SPOILT: Final = 500
_AVOIDED: Final = 100
_ELSEWHERE: Final = 10
# Chunks of one report.
_NAMED_MAX: Final = 512


@dataclass
class GetRequest:
    """The arguments of a get, checked."""

    namespace: str
    hashes: bytes
    memory: Memory
    shard: int
    lease: float
    deadline: float
    outcomes: npt.NDArray[np.uint8] = field(init=False)
    lengths: Int64s = field(init=False)
    errors: dict[int, MoonpoolError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outcomes = np.full(self.memory.count, _MISS, dtype=np.uint8)
        self.lengths = np.zeros(self.memory.count, dtype=np.int64)

    def hashes_of(self, items: npt.NDArray[np.intp]) -> bytes:
        """Return the packed hashes of some chunks."""
        return self.hashes if len(items) == self.memory.count else some_hashes(self.hashes, items)

    def begin_again(self, items: npt.NDArray[np.intp]) -> None:
        """Nothing has been said of these chunks."""
        self.outcomes[items] = _MISS
        for item in items.tolist():
            self.errors.pop(item, None)

    def fail(self, item: int, error: MoonpoolError, outcome: Outcome = Outcome.FAILED) -> None:
        """This chunk has failed for good."""
        error.item = item
        self.outcomes[item] = outcome
        self.errors[item] = error


@dataclass
class _Located:
    # Where chunks are, from when the master was asked until the lease is over.
    items: npt.NDArray[np.intp]
    extents: Records
    until: float
    cluster: str

    def some(self, which: npt.NDArray[Any]) -> _Located:
        return _Located(self.items[which], self.extents[which], self.until, self.cluster)


def get(core: Core, request: GetRequest) -> GetResults:
    """Get a batch. See `StoreClient.get`."""
    every = np.arange(request.memory.count)
    for begin in range(0, len(every), core.settings.batch_chunks):
        _get_some(core, request, every[begin : begin + core.settings.batch_chunks])
    outcomes, lengths = request.outcomes.tobytes(), request.lengths.tolist()
    core.count(gets=outcomes.count(_OK), get_bytes=sum(lengths))
    if any(outcomes):
        core.count(
            get_misses=outcomes.count(_MISS),
            gets_failed=outcomes.count(Outcome.FAILED),
            gets_corrupt=outcomes.count(Outcome.CORRUPT),
        )
    return GetResults(outcomes, request.errors, lengths, request.memory.made)


def _get_some(core: Core, request: GetRequest, items: npt.NDArray[np.intp]) -> None:
    known = _known(core, request, items)
    if known is not None:
        _fetch(core, request, known)
        items = items[request.outcomes[items] != _OK]
        if not len(items):
            return
        # Whatever it was, the master may know better by now.
        core.locations.forget(request.namespace, request.hashes_of(items))
    located = _locate(core, request, items)
    if known is not None:
        # What this get has found spoilt, and is nowhere now, may be gone at its word: that it was spoilt is the answer.
        request.begin_again(items[(request.outcomes[items] != _CORRUPT) | np.isin(items, located.items)])
    _fetch(core, request, located)


def _fetch(core: Core, request: GetRequest, located: _Located) -> None:
    sizes = _sizes(core, request, located)
    if sizes.min(initial=0) < 0:
        fits = sizes >= 0
        located, sizes = located.some(fits), sizes[fits]
    memory = request.memory
    pieces = list(memory.pieces(located.items, sizes, core.settings.batch_chunks, core.piece_bytes(memory)))
    if len(pieces) == 1:
        _Piecewise(core, request, located, sizes).run()
        return
    for number, rows in enumerate(pieces):
        some = located.some(rows)
        # A batch that goes in pieces may take longer than one lease: ask anew for what has not been begun.
        if number and located.until - time.monotonic() < request.lease / 2:
            some = _locate(core, request, located.items[rows])
            again = np.isin(located.items[rows], some.items)
            rows = rows[again]  # noqa: PLW2901 - the same rows, without those that have gone
            same = some.extents["length"].max(axis=1) == located.extents[rows]["length"].max(axis=1)
            # The others are other chunks under that hash: misses for now.
            some, rows = some.some(same), rows[same]  # noqa: PLW2901 - as above
        if len(rows):
            _Piecewise(core, request, some, sizes[rows]).run()


def _known(core: Core, request: GetRequest, items: npt.NDArray[np.intp]) -> _Located | None:
    """Return where chunks are without asking, if that is known of all of them and half of the lease is left."""
    hashes, master = request.hashes_of(items), core.link.identity
    found = core.locations.find(request.namespace, request.shard, hashes, master, time.monotonic() + request.lease / 2)
    if found is None or master is None:
        return None
    core.count(gets_located_before=len(items))
    return _Located(items, *found, master.cluster_id)


def _locate(core: Core, request: GetRequest, items: npt.NDArray[np.intp]) -> _Located:
    message = pb.LocateRequest(
        namespace=request.namespace,
        hashes=request.hashes_of(items),
        shard=request.shard,
        lease_ms=max(1, int(request.lease * 1000)),
    )
    until_loaded = last_wait(request.deadline)
    while True:
        sent, forgotten = time.monotonic(), core.locations.forgotten
        message.wait_ms = max(0, int((until_loaded - sent) * 1000))
        reply = core.call("Locate", message, request.deadline)
        # What lies on disks is on its way into memory. What comes too late is a miss.
        if pb.LOADING not in reply.statuses or time.monotonic() >= until_loaded:
            break
    extents = extents_of(reply.extents, len(items), max(1, reply.replicas))
    until = sent + reply.lease_ms / 1000
    master = MasterIdentity.of(reply.header)
    core.locations.keep(request.namespace, request.shard, message.hashes, extents, until, master, forgotten)
    located = _Located(items, extents, until, master.cluster_id)
    found = np.frombuffer(reply.statuses, dtype=np.uint8) == pb.OK
    return located if found.all() else located.some(found)


def _sizes(core: Core, request: GetRequest, located: _Located) -> Int64s:
    """Return how many bytes each located chunk has; -1 where they cannot be had, which is an error of it."""
    items = located.items
    sizes: Int64s = located.extents["length"].max(axis=1, initial=0).astype(np.int64)
    for row, error in request.memory.refused(core.staging, items, sizes):
        request.fail(int(items[row]), error)
        sizes[row] = -1
    return sizes


class _Piecewise:
    """One piece of a get: reads each chunk from one replica after the other until one of them is good."""

    def __init__(self, core: Core, request: GetRequest, located: _Located, sizes: Int64s) -> None:
        self._core = core
        self._request = request
        self._items = located.items
        self._extents = located.extents
        self._until = located.until
        self._cluster = located.cluster
        self._sizes = sizes
        self._tried = located.extents["segment"] == NO_SEGMENT
        self._corrupt = np.zeros(len(self._items), dtype=np.bool_)
        self._failure: MoonpoolError | None = None
        self._hashes = hash_matrix(request.hashes_of(self._items))

    def run(self) -> None:
        core, request = self._core, self._request
        piece = request.memory.place(core.staging, self._items, self._sizes, request.deadline)
        try:
            pending = np.arange(len(self._items))
            while len(pending):
                if time.monotonic() >= min(self._until, request.deadline):
                    self._late(len(pending))
                    return  # they stay what they were: misses
                choice = self._choose(pending)
                if choice.min() < 0:
                    nowhere = choice < 0
                    for row in pending[nowhere].tolist():
                        self._give_up(row)
                    pending, choice = pending[~nowhere], choice[~nowhere]
                if len(pending):
                    pending = pending[~self._read(piece, pending, choice)]
        finally:
            core.give_back(piece)

    def _choose(self, pending: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the replica to read next for each row; -1: none is left."""
        segments = self._extents["segment"][pending]
        if segments.shape[1] == 1:
            return np.where(self._tried[pending, 0], -1, 0)
        different, inverse = np.unique(segments, return_inverse=True)
        avoided, host = set(self._core.segments.avoided()), self._core.host_id
        weights = np.array(
            [
                (_AVOIDED if number in avoided else 0)
                + (_ELSEWHERE if self._core.segments.host_of(number) != host else 0)
                for number in different.tolist()
            ],
            dtype=np.int64,
        )
        replicas = segments.shape[1]
        # Equally good ones take turns, so that the second copies of a hot chunk are of use too.
        turns = (np.arange(replicas)[None, :] + self._items[pending][:, None] + self._core.counters["gets"]) % replicas
        score = weights[inverse.reshape(segments.shape)] + turns + _TRIED * self._tried[pending]
        score += _SPOILT * self._core.spoilt_copies.among(self._extents[pending])
        best: npt.NDArray[np.intp] = score.argmin(axis=1)
        return np.where(score.min(axis=1) >= _TRIED, -1, best)

    def _read(self, piece: Piece, pending: npt.NDArray[np.intp], choice: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Read from the chosen replicas; return which rows are done with."""
        core, request, place = self._core, self._request, piece.place
        extents = self._extents[pending, choice]
        self._tried[pending, choice] = True
        deadline = min(request.deadline, self._until)
        jobs = core.start_moves("read", place, pending, extents, self._cluster, deadline, True, piece.slice_.jobs)
        finished = np.zeros(len(pending), dtype=np.bool_)
        wanted = headers_of(extents, self._hashes[pending], request.shard)
        for job in jobs:
            moved = core.finish(job, place)
            # After the bytes have come, and before anything is believed.
            in_time = time.monotonic() < self._until
            if not in_time or isinstance(job.error, errors.ClusterChangedError):
                self._late(len(job.rows))
                finished[job.rows] = True
                continue
            rows = pending[job.rows]
            good = self._verified(place, rows, wanted[job.rows], moved)
            if good.all():
                finished[job.rows] = True
            else:
                if core.same_cluster(self._cluster):
                    self._blame(job, moved, good, rows, extents[job.rows])
                    finished[job.rows[good]] = True
                else:
                    # Nobody knows what lies there now. What is good is so: its digest is that of the chunk.
                    finished[job.rows] = True
                rows = rows[good]
            if len(rows):
                items = self._items[rows]
                request.memory.deliver(core.staging, piece, rows)
                request.outcomes[items] = _OK
                request.lengths[items] = request.memory.wanted(items, self._sizes[rows])
        return finished

    def _verified(
        self, place: Place, rows: npt.NDArray[np.intp], wanted: Headers, moved: Moved
    ) -> npt.NDArray[np.bool_]:
        """Return which rows are what they have to be: headers as `wanted`, with the digests of what has come."""
        good, staging = moved.good, self._core.staging
        if moved.error is not None and not good.any():
            return good
        found = moved.digests
        if place.starts is not None:
            return good & proved(staging.words, place, rows, wanted, found)
        if found is None:
            # Nobody has looked at the bytes yet, so the digest is all that tells of damage.
            found = self._core.digests(place, place.offsets[rows], place.lengths[rows])
        wanted[:, DIGEST_WORD] = found
        return good & headers_match(place.headers_at(rows), wanted)

    def _blame(
        self, job: Job, moved: Moved, good: npt.NDArray[np.bool_], rows: npt.NDArray[np.intp], extents: Records
    ) -> None:
        if job.error is not None:
            self._failure = job.error
            if job.blamed:
                self._core.failed(job.segment, self._cluster, job.error)
        corrupt = moved.good & ~good
        if corrupt.any():
            self._corrupt[rows[corrupt]] = True
            self._core.count(corrupt_found=int(corrupt.sum()))
            # What is beyond that is found again.
            which = np.flatnonzero(corrupt)[:_NAMED_MAX]
            which = which[self._core.spoilt_copies.add(extents[which])]
            if len(which):
                self._report_spoilt(job.segment, rows[which], extents[which])

    def _report_spoilt(self, segment: int, rows: npt.NDArray[np.intp], extents: Records) -> None:
        self._core.report(
            segment,
            self._cluster,
            errors.ChunkCorruptError(f"{len(rows)} chunks in segment {segment} are not what they were"),
            namespace=self._request.namespace,
            hashes=self._hashes[rows].tobytes(),
            generations=extents["generation"].tobytes(),
            shard=self._request.shard,
        )

    def _give_up(self, row: int) -> None:
        item = int(self._items[row])
        if self._corrupt[row]:
            error: MoonpoolError = errors.ChunkCorruptError(
                "no copy of the chunk that can be read has its header and digest", hint="compute it, and put it"
            )
            self._request.fail(item, error, Outcome.CORRUPT)
            generation = int(self._extents["generation"][row].max())
            self._core.spoilt(self._request.namespace, self._hashes[row].tobytes(), generation)
            return
        error = errors.NodeUnreachableError(
            "no node that has the chunk can be reached", cause=str(self._failure or ""), retryable=True
        )
        self._request.fail(item, error)

    def _late(self, count: int) -> None:
        self._core.count(gets_late=count)
