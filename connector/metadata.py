# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connector tell each other. Nothing else passes between them.

The scheduler side decides, the worker side moves. It crosses processes (pickled), to every rank at every step, so
all of it is small and none of it is a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from moonpool.connector.jobs import FetchJob, LendJob, Lent, LoadJob, SaveJob

__all__ = [
    "FetchJob",
    "LendJob",
    "Lent",
    "LoadJob",
    "MoonpoolMetadata",
    "MoonpoolWorkerMetadata",
    "PeerPlace",
    "SaveJob",
]


@dataclass(frozen=True)
class PeerPlace(KVConnectorHandshakeMetadata):
    """Where other engines reach a worker, once at the start.

    Attributes:
        address: ``host:port``.
        incarnation: of the worker's transfer engine.
        shard: the part of each chunk that it has.
    """

    address: str
    incarnation: str
    shard: int


@dataclass(slots=True)
class MoonpoolMetadata(KVConnectorMetadata):
    """From the scheduler side to every worker, with each step.

    Attributes:
        loads: to begin with this step.
        saves: to begin after what was computed in earlier steps; never of tokens that this step computes.
        cancelled: requests that need what they load no more. Each still ends, as finished and sooner.
        fetches: to begin with this step.
        dropped: fetches whose chunks nobody waits for any more.
        lending: blocks that other engines may read from now on.
        wiping: slots of leases that hold no more.
        holding: blocks of other engines that are needed from now on.
        returning: tokens of what is needed no more.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    fetches: list[FetchJob] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    lending: list[LendJob] = field(default_factory=list)
    wiping: list[int] = field(default_factory=list)
    holding: list[Lent] = field(default_factory=list)
    returning: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class MoonpoolWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler side, of one step.

    Attributes:
        ended_saves: jobs that need their blocks no more, whatever came of them -> how many workers say so.
        loaded: request -> how many chunks of its load, counted from the first, are in the cache of every worker.
            For every load that has ended in this step.
        unsaved: jobs among `ended_saves` of which not everything is in the pool.
        fetched: fetches that have ended -> how many workers say so, and how many chunks, counted from the first, are
            in the host memory of all of these.
        times: loads (by request) and fetches (by number) that have ended -> how many chunks came, in how many seconds
            of the slowest worker, and whether it was late or failed.
        wiped: slots of leases that are wiped -> how many workers say so.
        renewed: tokens of leases that other engines still need.
        returned: tokens of those that they need no more.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    unsaved: set[int] = field(default_factory=set)
    fetched: dict[int, tuple[int, int]] = field(default_factory=dict)
    times: dict[str | int, tuple[int, float, bool]] = field(default_factory=dict)
    wiped: dict[int, int] = field(default_factory=dict)
    renewed: set[bytes] = field(default_factory=set)
    returned: set[bytes] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MoonpoolWorkerMetadata:
        """Return what both workers say together."""
        assert isinstance(other, MoonpoolWorkerMetadata)
        ended, loaded = dict(self.ended_saves), dict(self.loaded)
        for job_id, workers in other.ended_saves.items():
            ended[job_id] = ended.get(job_id, 0) + workers
        for request_id, chunks in other.loaded.items():
            loaded[request_id] = min(chunks, loaded.get(request_id, chunks))
        fetched = dict(self.fetched)
        for fetch_id, (workers, chunks) in other.fetched.items():
            before, least = fetched.get(fetch_id, (0, chunks))
            fetched[fetch_id] = before + workers, min(least, chunks)
        times = dict(self.times)
        for name, (chunks, seconds, trouble) in other.times.items():
            fewest, slowest, before_trouble = times.get(name, (chunks, 0.0, False))
            times[name] = min(fewest, chunks), max(slowest, seconds), trouble or before_trouble
        wiped = dict(self.wiped)
        for slot, workers in other.wiped.items():
            wiped[slot] = wiped.get(slot, 0) + workers
        heard = self.renewed | other.renewed, self.returned | other.returned
        return MoonpoolWorkerMetadata(ended, loaded, self.unsaved | other.unsaved, fetched, times, wiped, *heard)
