# SPDX-License-Identifier: Apache-2.0
"""What a worker is asked to move. Without vLLM, so that what moves can be tested without it.

A *chunk* is `chunk_tokens` of a request, that is a fixed number of its blocks; its key is vLLM's chained hash of the
last of them, so it stands for all tokens from the beginning of the request. A *tail* is a chunk of fewer blocks, at the
end of a prompt that is handed over: it begins where a chunk does, and its key says its length, since that ends where no
chunk ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TOKEN_BYTES", "FetchJob", "LendJob", "Lent", "LoadJob", "SaveJob"]

#: Of what tells one lease from all others.
TOKEN_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Lent:
    """Blocks of another engine that this one may read, for as long as it says in time that it still needs them.

    Attributes:
        peers: where its workers are, and which incarnation of each, in the order of their shards.
        slot: of the lease, in the table of each worker.
        token: of the lease.
        digest: of which blocks are lent, and what has to be in them.
        block_ids: those that are needed.
        seconds: that it holds without being renewed.
    """

    peers: tuple[tuple[str, str], ...]
    slot: int
    token: bytes
    digest: bytes
    block_ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class LendJob:
    """Blocks that other engines may read from now on.

    Attributes:
        slot: of the lease, which no other one has meanwhile.
        token: of the lease.
        digest: of which blocks are lent, and what is in them.
    """

    slot: int
    token: bytes
    digest: bytes


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
        fetch_id: of the fetch that has brought its chunks into host memory, from where they come; 0: from the pool.
        tail_blocks: of the last chunk, where that is a tail; 0: it is none.
        lent: blocks of another engine to read first, one for each of `block_ids`. The pool is asked if that fails.
    """

    request_id: str
    hashes: bytes
    begin_block: int
    block_ids: list[int]
    is_async: bool
    timeout: float
    fetch_id: int = 0
    tail_blocks: int = 0
    lent: Lent | None = None


@dataclass(slots=True)
class FetchJob:
    """Chunks that are to be in host memory before the request that needs them gets any blocks.

    They stay there until a load takes them, or the fetch is dropped.

    Attributes:
        fetch_id: of the scheduler side, never used again.
        request_id: for messages.
        hashes: keys of the chunks, 32 bytes each, in order.
        timeout: seconds, from when the worker hears of it. What has not come by then does not come any more.
    """

    fetch_id: int
    request_id: str
    hashes: bytes
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
        tail_blocks: of the only chunk, where that is a tail; 0: it is none.
    """

    job_id: int
    request_id: str
    hashes: bytes
    parent: bytes
    block_ids: list[int]
    tail_blocks: int = 0
