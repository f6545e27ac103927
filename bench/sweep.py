# SPDX-License-Identifier: Apache-2.0
"""From lists of options to rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.bench.errors import UsageError
from moonpool.bench.verify import WORD_BYTES
from moonpool.bench.work import Tuning, Work, has_gpu
from moonpool.units import format_bytes

__all__ = ["DEFAULT_MEMORY", "FOOTPRINT_BYTES", "QUICK_FOOTPRINT_BYTES", "Sweep", "footprint_of", "quick"]

#: Memory of each side unless told otherwise: several times a last-level cache.
FOOTPRINT_BYTES = 256 << 20
#: The quick sweep's: filling and checking it costs more than the windows.
QUICK_FOOTPRINT_BYTES = 128 << 20
#: Whose memory is moved unless told otherwise: shared memory is at its best with the engine's own.
DEFAULT_MEMORY = {"tcp": "registered", "rdma": "registered", "shm": "allocated", "local": "registered"}


@dataclass(frozen=True)
class Sweep:
    """Every combination of these is a row; the last list varies fastest.

    Attributes:
        memories: whose memory it is.
        tunings: settings of the engines.
        depths: transfers of each thread under way at a time.
        footprint_bytes: memory of each side; None: `FOOTPRINT_BYTES`, or one batch per thread where that is more.
    """

    transports: Sequence[str]
    ops: Sequence[str] = ("read", "write")
    block_bytes: Sequence[int] = (1 << 20,)
    batches: Sequence[int] = (1,)
    orders: Sequence[str] = ("sequential",)
    lanes: Sequence[int | None] = (None,)
    threads: Sequence[int] = (1,)
    footprint_bytes: int | None = None
    memories: Sequence[str] = ("registered",)
    tunings: Sequence[Tuning] = (Tuning(),)
    depths: Sequence[int] = (1,)

    def works(self) -> list[Work]:
        """Return the rows.

        Raises:
            UsageError: a combination is impossible.
        """
        return [
            self._work(*values)
            for values in itertools.product(
                self.transports, self.memories, self.ops, self.tunings, self.lanes, self.threads, self.orders,
                self.block_bytes, self.batches, self.depths,
            )
        ]  # fmt: skip

    def works_within(self, footprint_min: int, footprint_max: int) -> list[Work]:
        """Return the rows for several engines side by side, each of which holds the footprint twice.

        A batch that does not fit into `footprint_max` bytes is made smaller. In which order single blocks come is
        nothing that one engine could use and another not: they come in the first order only.

        Raises:
            UsageError: a combination is impossible.
        """
        rows: dict[Work, None] = {}
        axes = (
            self.transports, self.memories, self.ops, self.threads, self.orders, self.block_bytes, self.batches
        )  # fmt: skip
        for transport, memory, op, threads, order, block_bytes, batch in itertools.product(*axes):
            _check_words(block_bytes)
            fits = min(batch, footprint_max // (block_bytes * threads))
            if fits == 0:
                raise UsageError(
                    f"{threads} x {format_bytes(block_bytes)} do not fit into {format_bytes(footprint_max)}",
                    hint=f"--footprint {format_bytes(block_bytes * threads)}",
                )
            if fits > 1 or order == self.orders[0]:
                footprint = max(footprint_min, block_bytes * fits * threads)
                rows[Work(transport, op, block_bytes, fits, order, threads, None, footprint, memory)] = None
        return list(rows)

    def _work(
        self, transport: str, memory: str, op: str, tuning: Tuning, lanes: int | None, threads: int, order: str,
        block_bytes: int, batch: int, depth: int,
    ) -> Work:  # fmt: skip
        _check_gpu(transport, memory)
        footprint = footprint_of(self.footprint_bytes, block_bytes, batch, threads * depth)
        return Work(transport, op, block_bytes, batch, order, threads, lanes, footprint, memory, tuning, depth)


def goes_with(transport: str, memory: str) -> bool:
    """Return whether a transport moves this memory."""
    try:
        _check_gpu(transport, memory)
    except UsageError:
        return False
    return True


def _check_gpu(transport: str, memory: str) -> None:
    if not has_gpu(memory):
        return
    if transport == "local":
        raise UsageError(f"--memory {memory} does not go with --transport local", hint="--transport shm, or tcp")
    if transport == "shm" and "registered" in memory:
        raise UsageError(
            f"--memory {memory} does not go with --transport shm, which is from GPU to GPU", hint="--transport tcp"
        )


def footprint_of(wanted: int | None, block_bytes: int, batch: int, batches: int, what: str = "block") -> int:
    """Return the memory that a row cycles through.

    Args:
        wanted: what was asked for; None: `FOOTPRINT_BYTES`, or more where it has to be.
        block_bytes: of one block.
        batch: blocks of a batch.
        batches: how many of them are under way at a time.
        what: a block is called.

    Raises:
        UsageError: it is too small, or blocks of this size cannot be verified.
    """
    _check_words(block_bytes, what)
    needed = block_bytes * batch * batches
    footprint = wanted or max(FOOTPRINT_BYTES, needed)
    if footprint < needed:
        raise UsageError(
            f"{batches} x {batch} {what}s of {format_bytes(block_bytes)} do not fit into a footprint of "
            f"{format_bytes(footprint)}",
            hint=f"--footprint {format_bytes(needed)}, or a smaller batch",
        )
    return footprint


def _check_words(block_bytes: int, what: str = "block") -> None:
    if block_bytes % WORD_BYTES:
        raise UsageError(
            f"a {what} of {block_bytes} bytes cannot be verified: {what}s are made of {WORD_BYTES}-byte words",
            hint=f"--block-size {max(WORD_BYTES, block_bytes // WORD_BYTES * WORD_BYTES)}",
        )


def quick(transports: Sequence[str]) -> list[Work]:
    """Return the rows of the sweep without options.

    A batch is at most the footprint, so large blocks come in smaller batches there.
    """
    blocks = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    return [
        Work(transport, op, block, min(batch, QUICK_FOOTPRINT_BYTES // block), "sequential", 1, None,
             QUICK_FOOTPRINT_BYTES, DEFAULT_MEMORY[transport])
        for transport, op, block, batch in itertools.product(transports, ("read", "write"), blocks, (1, 128))
    ]  # fmt: skip
