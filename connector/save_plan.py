# SPDX-License-Identifier: Apache-2.0
"""Which chunks are put into the pool, and which blocks are kept for that."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from moonpool.connector.events import Events
from moonpool.connector.keys import Keys, Known
from moonpool.connector.metadata import MoonpoolWorkerMetadata, SaveJob
from moonpool.connector.pool import PoolLink
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.tracked import Tracked

__all__ = ["Saves"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pinned:
    """A save that is under way.

    Attributes:
        blocks: which are kept from being used again.
        keys: of its chunks.
        workers: how many have not said yet that they need the blocks no more.
        since: when it was planned.
        whole: no worker has said that something did not arrive.
    """

    blocks: list[Any]
    keys: list[bytes]
    workers: int
    since: float
    whole: bool = True


class Saves:
    """Plans saves and keeps their blocks, within bounds. What is beyond them waits in its request, or is not saved.

    Args:
        link: to the pool: while that is away, nothing is planned.
        keys: of chunks.
        known: keys that need no saving.
        settings: of the connector.
        blocks: of one chunk.
        workers: how many save.
        counts: what is planned and dropped is counted here.
        events: told of what is in the pool.
    """

    def __init__(
        self,
        link: PoolLink,
        keys: Keys,
        known: Known,
        settings: ConnectorSettings,
        blocks: int,
        workers: int,
        counts: Counter[str],
        events: Events,
    ) -> None:
        self._link = link
        self._keys = keys
        self._known = known
        self._settings = settings
        self._blocks = blocks
        self._workers = workers
        self._counts = counts
        self._events = events
        self._ids = itertools.count(1)
        self._pinned: dict[int, _Pinned] = {}
        self._pinned_blocks = 0
        self._blocks_max = 0
        self._pool: Any = None
        self._jobs: list[SaveJob] = []

    def bind(self, pool: Any) -> None:
        """Take the block pool of the engine."""
        self._pool = pool
        self._blocks_max = int(self._settings.saving_blocks_max * pool.num_gpu_blocks)
        if self._blocks_max < self._blocks:
            _log.warning(
                "moonpool: nothing will be saved, since a chunk has %d blocks and saves may keep %d of %d: "
                "raise saving_blocks_max, or lower chunk_tokens",
                self._blocks,
                self._blocks_max,
                pool.num_gpu_blocks,
            )

    @property
    def pending(self) -> int:
        """How many saves are under way."""
        return len(self._pinned)

    @property
    def has_room(self) -> bool:
        """Whether a chunk can be saved now."""
        return self._room() > 0

    @property
    def pinned_blocks(self) -> int:
        """How many blocks they keep."""
        return self._pinned_blocks

    @property
    def oldest(self) -> float:
        """Since when the oldest save has been under way, in seconds; 0: there is none."""
        first = next(iter(self._pinned.values()), None)
        return 0.0 if first is None else time.monotonic() - first.since

    def plan(self, tracked: Tracked, computed: int, block_ids: list[int]) -> None:
        """Save what is full and computed of a request, in these blocks, and not known to be in the pool."""
        full = self._full(tracked, computed)
        keys = self._keys.some(tracked.request, tracked.saved, full)
        done = 0
        while done < len(keys):
            if self._is_known(tracked, keys[done]):
                done, tracked.saved = done + 1, tracked.saved + 1
                continue
            room = self._room()
            if room <= 0:
                # The blocks are the request's own still. It is tried again with the next step.
                return
            end = done + 1
            while end < min(len(keys), done + room) and not self._is_known(tracked, keys[end]):
                end += 1
            self._begin(tracked, tracked.saved, keys[done:end], block_ids)
            done, tracked.saved = end, tracked.saved + end - done
        tracked.save_at = (max(tracked.saved, full) + 1) * self._settings.chunk_tokens

    def plan_tail(self, tracked: Tracked, computed: int, block_ids: list[int]) -> int:
        """Save what is left of a prompt behind its last chunk, in whole blocks, for an engine that goes on with it.

        Returns:
            How many blocks of the prompt, from the first one on, are in the pool or on their way there.
        """
        request, block_tokens = tracked.request, self._settings.chunk_tokens // self._blocks
        blocks: int = min(request.num_prompt_tokens, computed) // block_tokens
        whole, tail = divmod(blocks, self._blocks)
        if tracked.saved < whole or not tail:
            return min(tracked.saved, whole) * self._blocks
        key = self._keys.of_blocks(request, blocks)
        if not self._is_known(tracked, key):
            if self._room() <= 0:
                return whole * self._blocks
            self._begin(tracked, whole, [key], block_ids, tail)
        return blocks

    def drop(self, tracked: Tracked, computed: int) -> None:
        """Count what a request leaves behind unsaved."""
        left = self._full(tracked, computed) - tracked.saved
        if left > 0:
            self._counts["chunks_dropped_away" if self._link.client is None else "chunks_dropped_full"] += left

    def ended(self, said: MoonpoolWorkerMetadata) -> None:
        """Workers need the blocks of some saves no more."""
        now = time.monotonic()
        for job_id, workers in said.ended_saves.items():
            pinned = self._pinned.get(job_id)
            if pinned is None:
                raise RuntimeError(f"save {job_id} has ended twice")
            pinned.workers -= workers
            pinned.whole &= job_id not in said.unsaved
            if pinned.workers <= 0:
                self._end(job_id, pinned, now)

    def take(self) -> list[SaveJob]:
        """Return what is to be told to the workers."""
        jobs, self._jobs = self._jobs, []
        return jobs

    # ---------------------------------------------------------------- inside

    def _full(self, tracked: Tracked, computed: int) -> int:
        tokens = computed
        if self._settings.save_mode == "prompt":
            tokens = min(tokens, tracked.request.num_prompt_tokens)
        return min(tokens // self._settings.chunk_tokens, self._keys.count(tracked.request))

    def _room(self) -> int:
        """How many chunks may be saved now."""
        if self._link.client is None or len(self._pinned) >= self._settings.saves_max:
            return 0
        return (self._blocks_max - self._pinned_blocks) // self._blocks

    def _is_known(self, tracked: Tracked, key: bytes) -> bool:
        # What was there before the pool was asked, and was not found then, is gone.
        learned = self._known.learned(key)
        return learned is not None and learned >= tracked.found

    def _begin(
        self, tracked: Tracked, first: int, keys: list[bytes], block_ids: list[int], tail_blocks: int = 0
    ) -> None:
        begin = first * self._blocks
        ids = block_ids[begin : begin + (tail_blocks or len(keys) * self._blocks)]
        blocks = [self._pool.blocks[one] for one in ids]
        job_id, request = next(self._ids), tracked.request
        self._pool.touch(blocks)
        self._pinned[job_id] = _Pinned(blocks, keys, self._workers, time.monotonic())
        self._pinned_blocks += len(blocks)
        for chunk, key in enumerate(keys, first):
            if self._known.saving(key) and not tail_blocks:
                self._events.removed(request, chunk)
        if not tail_blocks:  # which no router needs to know of: it is for one request that has gone already
            self._events.saving(job_id, request, first, len(keys))
        self._counts["chunks_planned"] += len(keys)
        parent = self._keys.parent(request, first)
        self._jobs.append(SaveJob(job_id, request.request_id, b"".join(keys), parent, ids, tail_blocks))

    def _end(self, job_id: int, pinned: _Pinned, now: float) -> None:
        del self._pinned[job_id]
        self._pinned_blocks -= len(pinned.blocks)
        # As vLLM frees a request: those that come last are used again first.
        self._pool.free_blocks(reversed(pinned.blocks))
        for key in pinned.keys:
            if pinned.whole:
                self._known.saved(key, now)
            else:
                self._known.lost(key)
        self._events.ended(job_id, whole=pinned.whole)
