# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connector tell each other. Nothing else passes between them.

The scheduler side decides, the worker side moves. It crosses processes (pickled), to every rank at every step, so
all of it is small and none of it is a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from moonpool.connector.jobs import LoadJob, SaveJob

__all__ = ["LoadJob", "MoonpoolMetadata", "MoonpoolWorkerMetadata", "SaveJob"]


@dataclass(slots=True)
class MoonpoolMetadata(KVConnectorMetadata):
    """From the scheduler side to every worker, with each step.

    Attributes:
        loads: to begin with this step.
        saves: to begin after what was computed in earlier steps; never of tokens that this step computes.
        cancelled: requests that need what they load no more. Each still ends, as finished and sooner.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


@dataclass(slots=True)
class MoonpoolWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler side, of one step.

    Attributes:
        ended_saves: jobs that need their blocks no more, whatever came of them -> how many workers say so.
        loaded: request -> how many chunks of its load, counted from the first, are in the cache of every worker.
            For every load that has ended in this step.
        unsaved: jobs among `ended_saves` of which not everything is in the pool.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    unsaved: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MoonpoolWorkerMetadata:
        """Return what both workers say together."""
        assert isinstance(other, MoonpoolWorkerMetadata)
        ended, loaded = dict(self.ended_saves), dict(self.loaded)
        for job_id, workers in other.ended_saves.items():
            ended[job_id] = ended.get(job_id, 0) + workers
        for request_id, chunks in other.loaded.items():
            loaded[request_id] = min(chunks, loaded.get(request_id, chunks))
        return MoonpoolWorkerMetadata(ended, loaded, self.unsaved | other.unsaved)
