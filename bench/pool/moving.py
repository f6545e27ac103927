# SPDX-License-Identifier: Apache-2.0
"""The windows of one row of the store: through the client, and through the engine alone."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.errors import BenchError, VerificationError
from moonpool.bench.pool.loading import AT_ONCE, batches_of
from moonpool.bench.pool.place import PoolPlace
from moonpool.bench.pool.windows import CallSide, Checked
from moonpool.bench.verify import Pattern
from moonpool.store_client import Outcome
from moonpool.store_client.packing import HEADER_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.bench.measure import Window
    from moonpool.bench.pool.work import StoreWork
    from moonpool.store_client.packing import Records
    from moonpool.store_client.pins import Pin

__all__ = ["GetRow", "PutRow", "Row", "row_of"]

#: The master takes room back after a while; what is done with it has to be over well before.
_SAFETY: Final = 0.8
_READ_SECONDS: Final = 60.0
_PINNED_AT_ONCE: Final = 32_768


class Row(Checked, ABC):
    """What the windows of puts and of gets have in common.

    Args:
        place: the pool.
        work: what is moved.
        number: gives a new number to each window.
    """

    def __init__(self, place: PoolPlace, work: StoreWork, number: Callable[[], int]) -> None:
        self._place = place
        self._work = work
        self._memory, self._region = place.memory("own", work.footprint_bytes)
        super().__init__(work.moved, self._memory, number)
        self.path: str | None = None

    @abstractmethod
    def engine_window(self, seconds: float, warmup: float) -> Window:
        """Run a window of the client, and verify it."""

    @abstractmethod
    def limit_window(self, seconds: float, warmup: float) -> Window:
        """Run a window of the engine alone, and verify it."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing of this row in the pool."""

    # ---------------------------------------------------------------- what is called

    def _values(self, blocks: slice) -> Any:
        """The chunks of a batch as the client takes them."""
        offsets, length = self._layout.offsets[blocks], self._work.block_bytes
        if self._work.memory == "registered":
            return self._region, offsets, np.full(len(offsets), length, dtype=np.int64)
        view = self._memory.data
        return [view[offset : offset + length] for offset in offsets.tolist()]

    def _client_side(self, hashes: bytes, *, once: bool) -> CallSide:
        work, namespace = self._work, self._place.namespace
        client = self._place.client_of(work.located)
        good = bytes([Outcome.OK]) * work.batch
        calls: list[Callable[[int], object]] = []
        for thread in range(work.threads):
            batches = [self._layout.batch(thread, index) for index in range(work.moved.batches)]
            # Everything that a real caller has at hand is made before the window.
            given = [(hashes[32 * some.start : 32 * some.stop], self._values(some)) for some in batches]

            def call(index: int, given: list[tuple[bytes, Any]] = given, count: int = len(given)) -> None:
                names, values = given[index % count]
                if work.op == "put":
                    results: Any = client.put(namespace, names, values, replicas=work.replicas)
                else:
                    results = client.get_into(namespace, names, values)
                if results.outcomes != good:
                    if results.count(Outcome.CORRUPT):
                        raise VerificationError(f"a {work.op} found damage: {results.errors[min(results.errors)]}")
                    results.require()
                    raise BenchError(
                        f"a {work.op} ended with {results!r}", hint="a pool with more room, and for itself"
                    )

            calls.append(call)
        return CallSide(calls, work.moved.batches, work.moved.batch_bytes, once=once)

    def _limit_side(self, extents: Records, *, once: bool) -> CallSide:
        """The engine's own transfers of the same bytes, to or from the same places."""
        work, engine = self._work, self._place.engine
        post: Any = engine.write if work.op == "put" else engine.read
        calls: list[Callable[[int], object]] = []
        for thread in range(work.threads):
            plans = [self._plan(extents, self._layout.batch(thread, index)) for index in range(work.moved.batches)]

            def call(index: int, plans: list[list[tuple[Any, ...]]] = plans, count: int = len(plans)) -> None:
                for transfer in [post(*moved) for moved in plans[index % count]]:
                    transfer.wait()

            calls.append(call)
        return CallSide(calls, work.moved.batches, work.moved.batch_bytes, once=once)

    def _plan(self, extents: Records, blocks: slice) -> list[tuple[Any, ...]]:
        """Return the arguments of the transfers of one batch: one for each segment, as the client makes them."""
        some = extents[blocks] if self._work.op == "put" else extents[blocks, :1]
        local = np.broadcast_to(self._layout.offsets[blocks, None], some.shape).reshape(-1)
        flat = some.reshape(-1)
        plans: list[tuple[Any, ...]] = []
        for segment in np.unique(flat["segment"]).tolist():
            rows = flat["segment"] == segment
            target = self._place.target(segment)
            self.path = target.peer.path or None
            remote = flat["offset"][rows].astype(np.int64) + HEADER_BYTES
            plans.append((
                target.peer, self._region, target.region, np.ascontiguousarray(local[rows]), remote,
                self._work.block_bytes,
            ))  # fmt: skip
        return plans

    # ---------------------------------------------------------------- verification

    def _check_pool(self, who: str, extents: Records, window: int, done: list[int]) -> None:
        """Read what the first `done` batches of each thread have written, every replica, with the engine alone."""
        scratch, region = self._place.memory("scratch", self._work.footprint_bytes)
        blocks = self._blocks(done)
        for replica in range(extents.shape[1]):
            pattern = Pattern(scratch, self._layout)
            pattern.fill(0)
            column = extents[blocks, replica]
            for segment in np.unique(column["segment"]).tolist():
                rows = np.flatnonzero(column["segment"] == segment)
                target = self._place.target(segment)
                for some in np.array_split(rows, max(1, len(rows) // AT_ONCE)):
                    self._place.engine.read(
                        target.peer, region, target.region, self._layout.offsets[blocks[some]],
                        column["offset"][some].astype(np.int64) + HEADER_BYTES, self._work.block_bytes,
                        deadline=_READ_SECONDS,
                    ).wait()  # fmt: skip
            pattern.expect(window, [(0, end) for end in done])
            verdict = pattern.check()
            if not verdict.ok:
                self._complain(who, f"{verdict.blocks_bad} chunks differ in the pool: {verdict.detail}")

    def _blocks(self, done: list[int]) -> NDArray[np.int64]:
        """Return the blocks of the first `done` batches of each thread. They lie next to each other."""
        parts = [
            np.arange(self._layout.batch(thread, 0).start, self._layout.batch(thread, end - 1).stop, dtype=np.int64)
            for thread, end in enumerate(done)
        ]
        return np.concatenate(parts)


class PutRow(Row):
    """Puts chunks with fresh keys. A window ends when the footprint has been put once, or its time is over."""

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `Row`. There is no warm-up: every chunk that it put would have to be removed again."""
        del warmup
        hashes = os.urandom(32 * self._work.moved.blocks)
        number = self._number()
        self._pattern.fill(number)
        side = self._client_side(hashes, once=True)
        try:
            window = side.run(seconds)
            done = [int(end) for end in side.next_batch]
            placed = self._placed(hashes, done)
            self._check_pool("put", placed, number, done)
            self._check_own("source of the put")
        finally:
            side.close()
            self._place.remove(hashes)
        return window

    def limit_window(self, seconds: float, warmup: float) -> Window:
        """See `Row`. The room is given by the master as for a put, and given back afterwards."""
        del warmup
        number = self._number()
        self._pattern.fill(number)
        given = self._place.start(os.urandom(32 * self._work.moved.blocks), self._work.block_bytes, self._work.replicas)
        try:
            side = self._limit_side(given.extents, once=True)
            left = given.begin_until - time.monotonic()
            if left < 0:
                raise BenchError("the preparation of the limit took too long", hint="a smaller --footprint")
            window = side.run(min(seconds, _SAFETY * left))
            done = [int(end) for end in side.next_batch]
            self._check_pool("limit", given.extents, number, done)
            side.close()
            if time.monotonic() > given.write_until:
                raise BenchError("the verification of the limit took too long", hint="a smaller --footprint")
        finally:
            self._place.give_back(given)
        self._check_own("source of the limit")
        return window

    def close(self) -> None:
        """Nothing is left."""

    def _placed(self, hashes: bytes, done: list[int]) -> Records:
        """Return extents of all blocks; of those that were not put, anything."""
        blocks = self._blocks(done)
        matrix = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32)
        found = self._place.locate(matrix[blocks].tobytes())
        if found.shape[1] < self._work.replicas:
            self._complain("put", f"chunks have {found.shape[1]} replicas and not {self._work.replicas}")
        placed: Records = np.zeros((len(matrix), found.shape[1]), dtype=found.dtype)
        placed[blocks] = found
        return placed


class GetRow(Row):
    """Gets chunks that were put before, and that are pinned meanwhile."""

    def __init__(self, place: PoolPlace, work: StoreWork, number: Callable[[], int]) -> None:
        super().__init__(place, work, number)
        self._hashes = os.urandom(32 * work.moved.blocks)
        self._content = number()
        self._pins: list[Pin] = []
        self._pattern.fill(self._content)
        client, length = place.client, work.block_bytes
        try:
            # In pieces that the client writes in one go.
            step = max(1, min(AT_ONCE, (64 << 20) // length))
            for begin in range(0, work.moved.blocks, step):
                offsets = self._layout.offsets[begin : begin + step]
                values = (self._region, offsets, np.full(len(offsets), length, dtype=np.int64))
                names = self._hashes[32 * begin : 32 * (begin + step)]
                client.put(place.namespace, names, values, replicas=work.replicas).require()
            for some in batches_of(self._hashes, _PINNED_AT_ONCE):
                self._pins.append(client.pin(place.namespace, some))
            self._sides = (
                self._client_side(self._hashes, once=False),
                self._limit_side(place.locate(self._hashes), once=False),
            )
        except BaseException:
            self.close()
            raise

    def engine_window(self, seconds: float, warmup: float) -> Window:
        """See `Row`."""
        return self._got("get", self._sides[0], self._content, seconds, warmup)

    def limit_window(self, seconds: float, warmup: float) -> Window:
        """See `Row`."""
        return self._got("limit", self._sides[1], self._content, seconds, warmup)

    def close(self) -> None:
        """Remove the chunks."""
        for pin in self._pins:
            pin.release()
        self._place.remove(self._hashes)


def row_of(place: PoolPlace, work: StoreWork, number: Callable[[], int]) -> Row:
    """Return what makes the windows of `work`."""
    return PutRow(place, work, number) if work.op == "put" else GetRow(place, work, number)
