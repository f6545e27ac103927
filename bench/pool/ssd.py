# SPDX-License-Identifier: Apache-2.0
"""The disk of a node: chunks read from it as a node reads them, beside raw reads of the same bytes of the same file."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from moonpool.node.diskcopying import DiskCopier
from moonpool.node.extents import size_of
from moonpool.node.slab import BLOCK, EXTENTS_AT, Slab, SlabPlace
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.leaves import leaves_of
from moonpool.store_client.packing import DIGEST_WORD, EXTENT, headers_of
from moonpool.transfer_engine import TransferEngine, combine_batch, digest_batch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SsdPlace", "SsdResult", "SsdWork"]

_MEMORY: Final = 1
_DISK: Final = 2
_SECONDS: Final = 600.0
#: An extent of a Copy, as numpy has it.
_COPIED: Final = np.dtype(
    [
        ("generation", "<u8"),
        ("there", "<u8"),
        ("here", "<u8"),
        ("length", "<u8"),
        ("shard", "<u4"),
        ("zero", "<u4"),
        ("hash", "<u8", 4),
    ]
)


@dataclass(frozen=True)
class SsdWork:
    """A row: chunks of one size, of which so many are read at once, and their bytes in all."""

    block_size: int
    depth: int
    footprint_bytes: int

    @property
    def count(self) -> int:
        """Chunks."""
        return max(1, self.footprint_bytes // self.block_size)

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.count} chunks of {self.block_size} bytes, {self.depth} at once"


@dataclass
class SsdResult:
    """What a row has found: bytes a second of each round, of the tier and of the raw reads."""

    work: SsdWork
    direct: bool = True
    tier: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Of each round, tier / raw."""
        return [tier / raw for tier, raw in zip(self.tier, self.raw, strict=True)]

    @property
    def ratio(self) -> float | None:
        """The median of them."""
        return statistics.median(self.ratios) if self.tier else None


class SsdPlace:
    """Memory and disk of a node, with a chunk in each place. A context manager.

    Args:
        folder: on the disk that is measured; a file is made there.
        work: what is read.
    """

    def __init__(self, folder: Path, work: SsdWork) -> None:
        self._work = work
        self._padded = -(-size_of(work.block_size) // BLOCK) * BLOCK
        self._path = folder / "slab"
        capacity = max(self._padded * work.count, 1 << 20)
        failures: list[str] = []
        with contextlib.ExitStack() as undo:
            self._slab = Slab(SlabPlace(self._path, capacity))
            undo.callback(self._slab.close)
            self._engine = undo.enter_context(TransferEngine(name="ssd", listen="127.0.0.1:0"))
            self._region = self._engine.allocate(self._padded * work.count)
            self._incarnation = bytes.fromhex(self._engine.incarnation)
            self._copier = DiskCopier(self._slab, self._region, self._incarnation, "bench", work.depth, failures.append)
            undo.callback(self._copier.close)
            self._fd = os.open(self._path, os.O_RDONLY | (os.O_DIRECT if self._slab.direct else 0))
            undo.callback(os.close, self._fd)
            self._threads = undo.enter_context(ThreadPoolExecutor(work.depth))
            self._undo = undo.pop_all()
        self._failures = failures
        self._copier.memory = _MEMORY
        self._memory = np.frombuffer(memoryview(self._region), dtype=np.uint8)
        self._buffers = [mmap.mmap(-1, self._padded) for _ in range(work.depth)]
        self._rows = self._extents()
        self._known = b""

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by, of both."""
        return self._slab.direct

    def write(self) -> list[str]:
        """Have every chunk written to the disk, as a node does. Returns what went wrong."""
        self._slab.keep(bytes(16), _DISK)
        self._fill()
        self._known = self._digests()
        return self._copied(up=False)

    def tier(self) -> tuple[float, list[str]]:
        """Read every chunk into memory, once. Returns (bytes a second, what was wrong with what came)."""
        self._memory[:] = 0xEE
        began = time.perf_counter()
        complaints = self._copied(up=True)
        took = time.perf_counter() - began
        if self._digests() != self._known:
            complaints.append("what came into memory is not what was written")
        return self._work.count * self._work.block_size / took, complaints

    def raw(self) -> float:
        """Read the same blocks of the file into buffers, as many at once. Returns bytes of chunks a second."""
        todo = iter(range(self._work.count))
        began = time.perf_counter()
        for done in [self._threads.submit(self._read, todo, buffer) for buffer in self._buffers]:
            done.result(_SECONDS)
        return self._work.count * self._work.block_size / (time.perf_counter() - began)

    def close(self) -> None:
        """End everything but the file."""
        del self._memory
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- parts

    def _digests(self) -> bytes:
        """Return those of all extents as they are in memory; what lies between them is nobody's."""
        starts = self._rows["here"].astype(np.int64)
        return bytes(digest_batch(self._region, starts, np.full(len(starts), size_of(self._work.block_size))))

    def _read(self, todo: Iterator[int], buffer: mmap.mmap) -> None:
        # One iterator for all threads: the interpreter gives each number to one of them.
        for row in todo:
            got = os.preadv(self._fd, [buffer], EXTENTS_AT + row * self._padded)
            if got != self._padded:
                raise OSError(f"{self._path} gave {got} bytes of {self._padded}")

    def _extents(self) -> npt.NDArray[np.void]:
        rows = np.zeros(self._work.count, dtype=_COPIED)
        rows["generation"] = np.arange(1, len(rows) + 1)
        rows["there"] = rows["here"] = np.arange(len(rows)) * self._padded
        rows["length"] = self._work.block_size
        rows["hash"] = np.random.default_rng(1).integers(0, 1 << 63, (len(rows), 4))
        return rows

    def _fill(self) -> None:
        """Have chunks in memory as clients write them: header, payload, digests of leaves."""
        length, chance = self._work.block_size, np.random.default_rng(2)
        self._memory[:] = 0
        placed = np.zeros(len(self._rows), dtype=EXTENT)
        for name in ("generation", "length"):
            placed[name] = self._rows[name]
        headers = headers_of(placed, self._rows["hash"], 0)
        leaves = leaves_of(np.array([length]))
        for row, header in enumerate(headers):
            at = row * self._padded
            payload = chance.integers(0, 256, length, dtype=np.uint8)
            table = digest_batch(payload, leaves.starts, leaves.lengths)
            header[DIGEST_WORD] = int.from_bytes(
                combine_batch(table, 0, len(table)) if len(leaves.starts) > 1 else table, "little"
            )
            whole = header.tobytes() + payload.tobytes() + (table if len(leaves.starts) > 1 else b"")
            self._memory[at : at + len(whole)] = np.frombuffer(whole, dtype=np.uint8)

    def _copied(self, *, up: bool) -> list[str]:
        """Carry out copies of all chunks, as many in one as a master asks for. Returns what went wrong."""
        source = pb.Segment(segment=_DISK if up else _MEMORY, incarnation=self._incarnation)
        answers: queue.Queue[pb.CopyDone] = queue.Queue()
        each = max(1, (32 << 20) // self._work.block_size)
        parts = [self._rows[at : at + each] for at in range(0, len(self._rows), each)]
        for number, part in enumerate(parts):
            copy = pb.Copy(
                copy=number + 1,
                source=source,
                segment=_MEMORY if up else _DISK,
                extents=part.tobytes(),
                deadline_ms=int(_SECONDS * 1000),
            )
            self._copier.take(copy, answers.put)
        done = [answers.get(timeout=_SECONDS) for _ in parts]
        bad = sum(len(one.statuses) - one.statuses.count(pb.OK) for one in done)
        causes = {one.cause for one in done if one.cause} | set(self._failures)
        return [f"{bad} chunks were not copied: {'; '.join(sorted(causes))}"] if bad else []


def measure(
    folder: Path, works: Sequence[SsdWork], rounds: int, results: list[SsdResult], say: Callable[[str], None]
) -> None:
    """Measure rows, each round a window of either in turn, and append what was found as it comes.

    Raises:
        DiskError, ConfigError: there is no room for the file, or it cannot be used.
    """
    for number, work in enumerate(works, 1):
        where = f"row {number} of {len(works)}: {work.text}"
        say(f"{where}, writing")
        with TemporaryDirectory(prefix="mooncake-bench-", dir=folder) as made, SsdPlace(Path(made), work) as place:
            result = SsdResult(work, direct=place.direct, complaints=place.write())
            results.append(result)
            for turn in range(rounds):
                say(f"{where}, round {turn + 1} of {rounds}")
                # They take turns at being first.
                raw = place.raw() if turn % 2 else 0.0
                tier, complaints = place.tier()
                result.raw.append(raw or place.raw())
                result.tier.append(tier)
                result.complaints += complaints
