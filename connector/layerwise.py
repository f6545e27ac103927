# SPDX-License-Identifier: Apache-2.0
"""Loads layer by layer: while a step computes one layer, the next one comes.

A chunk is stored layer by layer, so that some layers of it are a range. Ranges cost whole leaves, so layers that are
smaller than a leaf come in groups. What goes through staging goes through that of the client, one group at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moonpool.connector.layout import SEAL_BYTES
from moonpool.connector.loading import CUT_SHORT, OK, Load, complain_of_layout
from moonpool.errors import MoonpoolError
from moonpool.store_client import MasterUnavailableError
from moonpool.store_client.packing import HASH_BYTES
from moonpool.transfer_engine import LEAF_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from moonpool.connector.counting import Counts
    from moonpool.connector.jobs import LoadJob
    from moonpool.connector.layout import Int64s, PagedCache
    from moonpool.connector.moving import Pool
    from moonpool.connector.ordering import Mark
    from moonpool.store_client import GetResults
    from moonpool.transfer_engine import TransferEngine

__all__ = ["Layerwise"]

_log = logging.getLogger("moonpool.connector")


@dataclass(eq=False, slots=True)
class _Step:
    """The loads of one step.

    Attributes:
        loads: all of them.
        tables: their blocks.
        computes: whether the step has a forward pass that waits for layers.
        until: when their time is over.
        mark: work of the device that has to have ended before their blocks are filled.
        seconds: how long it took to bring them.
        come: how many groups of layers are there, as far as they come.
        waited: layers that the step has waited for.
        over: nothing that comes from now on is of use.
        thread: that brings them. It ends with the step.
    """

    loads: list[Load]
    tables: list[Int64s]
    computes: bool
    until: float
    mark: Mark
    seconds: float = 0.0
    come: int = 0
    waited: set[int] = field(default_factory=set)
    over: bool = False
    thread: threading.Thread | None = None


class Layerwise:
    """The loads of one worker's steps. A step has at most one batch of them, and nothing of it outlives the step.

    Methods are those of the worker's main thread. `close` may be called on another one.

    Args:
        engine: allocates memory for the seals of chunks.
        pool: where the chunks are.
        cache: where they go.
        counts: of this worker.
        drafts: whether layers of a draft model are among those of the cache. They compute after the step has ended.
    """

    def __init__(
        self, engine: TransferEngine, pool: Pool, cache: PagedCache, counts: Counts, *, drafts: bool = False
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._counts = counts
        self._drafts = drafts
        # A chunk has at least one block of its own.
        self._seals = engine.allocate(cache.num_blocks * SEAL_BYTES)
        self._groups = _groups(cache.layer_bytes)
        self._group_of = [number for number, (first, last) in enumerate(self._groups) for _ in range(first, last)]
        self._changed = threading.Condition()
        self._step: _Step | None = None
        self._warned = False

    def __len__(self) -> int:
        return len(self._step.loads) if self._step is not None else 0

    def oldest(self, now: float) -> float:
        """Return how long ago the oldest load began that has not ended; 0: there is none."""
        return now - self._step.loads[0].began if self._step is not None else 0.0

    def begin(self, jobs: Sequence[LoadJob], *, computes: bool) -> None:
        """Begin the loads of a step. Without a forward pass that waits for layers, they are there on return."""
        assert self._step is None, "loads of two steps at a time"
        now = time.monotonic()
        loads = [
            Load(job=job, chunk_blocks=self._cache.chunk_blocks, began=now, until=now + job.timeout) for job in jobs
        ]
        for load in loads:
            load.good, load.reason = load.chunks, "ok"
        tables = [self._cache.table(job.block_ids, job.begin_block) for job in jobs]
        step = _Step(loads, tables, computes, min(load.until for load in loads), self._cache.mark())
        step.thread = threading.Thread(target=self._bring, args=(step,), name="moonpool-layers", daemon=True)
        self._step = step
        step.thread.start()
        if not computes:
            self._wait(step, len(self._groups))

    def wait_for_layer(self, name: str) -> None:
        """Wait until a layer is there, or has failed, or its time is over."""
        step = self._step
        if step is None:
            return
        layer = self._cache.layer_of.get(name)
        # Of a layer that nobody has told of it is not known what it reads.
        groups = len(self._groups) if layer is None else self._group_of[layer] + 1
        self._wait(step, groups)
        if layer is not None:
            step.waited.add(layer)

    def ended(self) -> list[Load]:
        """End the step, and return its loads. Nothing touches their blocks any more."""
        step = self._step
        if step is None:
            return []
        assert step.thread is not None
        self._wait(step, len(self._groups))
        # It is in a call of the client at most, whose time is over too.
        step.thread.join()
        self._step = None
        if step.computes and not self._all_waited(step):
            self._doubt(step)
        for load in step.loads:
            load.seconds = step.seconds
            self._counts.add(**{f"loads_{load.reason}": 1, "load_chunks": load.good})
            if 0 < load.good < load.chunks:
                self._counts.add(loads_partial=1)
            self._counts.observe("load_seconds", time.monotonic() - load.began)
        return step.loads

    def close(self) -> None:
        """End what is under way. The client is closed already, so that nothing waits for it."""
        step = self._step
        if step is not None and step.thread is not None:
            step.thread.join()

    # ---------------------------------------------------------------- inside

    def _wait(self, step: _Step, groups: int) -> None:
        with self._changed:
            while step.come < groups and not step.over:
                left = step.until - time.monotonic()
                if left <= 0:
                    # Also what comes a moment later is of no use: the layer computes without it.
                    self._fail(step, "late")
                    return
                self._changed.wait(left)

    def _all_waited(self, step: _Step) -> bool:
        if self._drafts:
            return bool(step.waited)
        return len(step.waited) == len(self._group_of)

    def _doubt(self, step: _Step) -> None:
        # Maybe a layer has computed before its bytes were there.
        with self._changed:
            self._fail(step, "failed")
        if not self._warned:
            self._warned = True
            _log.warning(
                "moonpool: vLLM has waited for %d of %d layers, so that what layerwise loads is computed instead: use "
                "another load_mode with this model, or piecewise CUDA graphs",
                len(step.waited),
                len(self._group_of),
            )

    def _fail(self, step: _Step, reason: str) -> None:
        # With the lock: nothing of any load is of use.
        step.over = True
        for load in step.loads:
            if load.reason == "ok":
                load.reason = reason
            load.good = 0
        self._changed.notify_all()

    # ---------------------------------------------------------------- on the thread

    def _bring(self, step: _Step) -> None:
        try:
            if not step.mark.reached(step.until):
                with self._changed:
                    self._fail(step, "late")
                return
            for first, last in self._groups:
                if not self._bring_group(step, first, last):
                    return
        except MoonpoolError as error:
            if isinstance(error, MasterUnavailableError):
                self._pool.link.failed(error)
            self._counts.complain("a load has failed", error)
        except Exception:  # noqa: BLE001 - it is logged, and the step must not wait for what never comes
            _log.exception("moonpool: a load has failed, by a fault of the connector")
        else:
            return
        with self._changed:
            self._fail(step, "failed")

    def _bring_group(self, step: _Step, first: int, last: int) -> bool:
        """Bring some layers of what is good yet of all loads; return whether more are to come."""
        client = self._pool.link.client
        left = step.until - time.monotonic()
        if client is None or left <= 0:
            with self._changed:
                self._fail(step, "away" if client is None else "late")
            return False
        goods = [load.good for load in step.loads]
        table = np.concatenate([table[:good] for table, good in zip(step.tables, goods, strict=True)])
        rows, starts, sizes, places = self._cache.parts(table, first, last, self._seals)
        hashes = b"".join(load.job.hashes[: HASH_BYTES * good] for load, good in zip(step.loads, goods, strict=True))
        packed = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)[rows].tobytes()
        got = client.get_into(
            self._pool.namespace, packed, places, ranges=(starts, sizes), shard=self._pool.shard, timeout=left
        )
        self._pool.link.answered()
        bad = self._bad(got, rows)
        if last == len(self._group_of):
            bad = np.union1d(bad, self._unsealed(len(table), bad))
        with self._changed:
            if step.over:
                return False
            self._counts.add(load_layer_bytes=int(sizes.sum()))
            self._shorten(step, goods, bad)
            step.come += 1
            step.seconds = time.monotonic() - step.loads[0].began
            step.over = not any(load.good for load in step.loads)
            self._changed.notify_all()
            return not step.over

    def _bad(self, got: GetResults, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return which chunks have not come, in order."""
        outcomes = np.frombuffer(got.outcomes, dtype=np.uint8)
        bad = np.flatnonzero(outcomes != OK)
        if len(bad):
            first = int(bad[0])
            self._counts.add(**{CUT_SHORT.get(int(outcomes[first]), "load_chunks_failed"): 1})
            if first in got.errors:
                self._counts.complain("a chunk cannot be had and is computed", got.errors[first])
        return np.unique(rows[bad])

    def _unsealed(self, chunks: int, bad: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return which chunks, among those that have come, another worker stored in another layout."""
        sealed = self._cache.are_seals(self._seals, np.arange(chunks) * SEAL_BYTES)
        sealed[bad] = True
        unsealed = np.flatnonzero(~sealed)
        if len(unsealed):
            complain_of_layout(self._counts)
        return unsealed

    @staticmethod
    def _shorten(step: _Step, goods: list[int], bad: npt.NDArray[np.intp]) -> None:
        begin = 0
        for index, good in enumerate(goods):
            at = int(np.searchsorted(bad, begin))
            if at < len(bad) and bad[at] < begin + good:
                step.loads[index].good, step.loads[index].reason = int(bad[at]) - begin, "missing"
            begin += good


def _groups(layer_bytes: list[int]) -> list[tuple[int, int]]:
    """Return (first layer, layer after the last) of what comes together: a leaf or more."""
    groups, first, nbytes = [], 0, 0
    for layer, size in enumerate(layer_bytes, 1):
        nbytes += size
        if nbytes >= LEAF_BYTES or layer == len(layer_bytes):
            groups.append((first, layer))
            first, nbytes = layer, 0
    return groups
