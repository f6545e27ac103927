# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connector tell each other. Nothing else passes between them.

The scheduler side decides, the worker side moves. It crosses processes (pickled), to every rank at every step, so
all of it is small and none of it is a tensor.

A *chunk* is `chunk_tokens` of a request, that is a fixed number of its blocks; its key is vLLM's chained hash of the
last of them, so it stands for all tokens from the beginning of the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["LoadJob", "MoonpoolMetadata", "MoonpoolWorkerMetadata", "SaveJob"]


@dataclass(slots=True)
class LoadJob:
    """Blocks of one request that are to be filled from the pool.

    Attributes:
        request_id: whose blocks. A request has at most one load under way.
        hashes: keys of the chunks, 32 bytes each, in order.
        begin_block: how many blocks of the first chunk are left out, since the cache has them.
        block_ids: where the blocks go that come after those, one after the other. The last chunk may go only in part.
        is_async: the request waits, and the load may take until its timeout while others run. Else the blocks have to
            be there before this step computes.
        timeout: seconds, from when the worker hears of it. What has not come by then has failed.
    """

    request_id: str
    hashes: bytes
    begin_block: int
    block_ids: list[int]
    is_async: bool
    timeout: float


@dataclass(slots=True)
class SaveJob:
    """Chunks of one request whose tokens have been computed, in blocks that stay as they are until the job has ended.

    Attributes:
        job_id: of the scheduler side, never used again.
        request_id: for messages.
        hashes: keys of the chunks, 32 bytes each, in order: a chain.
        parent: the key of the chunk before the first one; `ROOT`: there is none.
        block_ids: where they lie, all blocks of the first chunk, then of the next one.
    """

    job_id: int
    request_id: str
    hashes: bytes
    parent: bytes
    block_ids: list[int]


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
