# SPDX-License-Identifier: Apache-2.0
"""Every byte of both sides is known before a window and checked after it.

The content of a block is a fixed random sequence combined with a key of its own, made from the number of the window
and of the block. A block that is missing, torn, stale, or in another block's place has another content. The receiving
side holds for each block the window that last wrote it, so that bytes written where nothing was due are found as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.work import Layout, mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from moonpool.bench.gpu.memory import GpuMemory

__all__ = ["WORD_BYTES", "Pattern", "Verdict"]

#: Blocks are a multiple of this.
WORD_BYTES: Final = 8
# Worked on at once: it stays in the second-level cache.
_TILE_WORDS: Final = 32 * 1024


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        ok: every byte is as it has to be.
        blocks_bad: blocks with at least one wrong byte.
        detail: the first difference, or ``""``.
    """

    ok: bool
    blocks_bad: int = 0
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {"ok": self.ok, "blocks_bad": self.blocks_bad, "detail": self.detail}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Verdict:
        """Read what `to_json` made. Only a plain true counts as verified."""
        return cls(fields.get("ok") is True, int(fields.get("blocks_bad", 0)), str(fields.get("detail", "")))


class Pattern:
    """The expected content of one side's memory.

    Args:
        memory: the side's bytes, at least ``layout.work.blocks`` blocks.
        layout: where the blocks lie in it.
        gpu: the memory of a GPU that `memory` is the image of, or None.
    """

    def __init__(self, memory: NDArray[np.uint8], layout: Layout, gpu: GpuMemory | None = None) -> None:
        self._gpu = gpu
        work = layout.work
        self._layout = layout
        self._words = work.block_bytes // WORD_BYTES
        used = memory[: work.blocks * work.block_bytes]
        self._memory = used.view(np.uint64).reshape(work.blocks, self._words)
        self._sequence = mix(np.arange(self._words, dtype=np.uint64) ^ np.uint64(0x6D6F6F6E706F6F6C))
        self._window = np.zeros(work.blocks, dtype=np.uint64)
        self._scratch = np.empty(_TILE_WORDS, dtype=np.uint64)

    def fill(self, window: int) -> None:
        """Write the content of `window` into every block."""
        self._window[:] = window
        keys = self._keys()
        for rows, columns in self._tiles():
            np.bitwise_xor(self._sequence[None, columns], keys[rows, None], out=self._memory[rows, columns])
        if self._gpu is not None:
            self._gpu.push()

    def expect(self, window: int, done: Sequence[tuple[int, int]]) -> None:
        """Note that `window` moved, for each thread, the batches from the first number up to the second."""
        batches = self._layout.work.batches
        for thread, (first, end) in enumerate(done):
            for index in range(first, min(end, first + batches)):
                self._window[self._layout.batch(thread, index)] = window

    def check(self) -> Verdict:
        """Compare every byte."""
        if self._gpu is not None:
            self._gpu.pull()
        keys = self._keys()
        bad: set[int] = set()
        detail = ""
        for rows, columns in self._tiles():
            actual = self._memory[rows, columns]
            expected = self._scratch[: actual.size].reshape(actual.shape)
            np.bitwise_xor(self._sequence[None, columns], keys[rows, None], out=expected)
            if np.array_equal(actual, expected):
                continue
            wrong = np.argwhere(actual != expected)
            if not detail:
                row, column = (int(number) for number in wrong[0])
                detail = self._describe(
                    rows.start + row, columns.start + column, int(actual[row, column]), int(expected[row, column])
                )
            bad.update(rows.start + int(row) for row in np.unique(wrong[:, 0]))
        return Verdict(not bad, len(bad), detail)

    def _keys(self) -> NDArray[np.uint64]:
        """One key per place, in the order of the memory."""
        blocks = np.arange(len(self._window), dtype=np.uint64)
        keys = np.empty_like(blocks)
        keys[self._layout.places] = mix(mix(self._window) ^ blocks)
        return keys

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        rows_at_once = max(1, _TILE_WORDS // self._words)
        for row in range(0, len(self._memory), rows_at_once):
            rows = slice(row, min(row + rows_at_once, len(self._memory)))
            for column in range(0, self._words, _TILE_WORDS):
                yield rows, slice(column, min(column + _TILE_WORDS, self._words))

    def _describe(self, place: int, word: int, actual: int, expected: int) -> str:
        # Words are little-endian in memory: the lowest byte that differs is the first.
        byte = ((actual ^ expected) & -(actual ^ expected)).bit_length() - 1
        offset = word * WORD_BYTES + byte // 8
        return (
            f"byte {place * self._words * WORD_BYTES + offset} of the memory (byte {offset} of the block at place "
            f"{place}) begins a word that is {actual:#018x} and not {expected:#018x}"
        )
