# SPDX-License-Identifier: Apache-2.0
"""Transfers of every awkward size, and after each a look at every byte of both memories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.address import Address
from moonpool.bench.hardware.steps import Check, Result, Step
from moonpool.bench.memory import allocate
from moonpool.bench.rails import bytes_by_rail
from moonpool.bench.verify import Pattern
from moonpool.bench.work import OPS, Layout, Tuning, Work
from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import TransferEngine, digest
from moonpool.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.bench.backends import Place
    from moonpool.bench.targets import Target
    from moonpool.transfer_engine.settings import EngineOptions

__all__ = ["FULL", "QUICK", "Plan", "correctness"]

_MIB: Final = 1 << 20
_BLOCK: Final = 4096
_REGION: Final = "mooncake-bench"
_WINDOW: Final = 1
#: For one transfer, on any device; and for filling and looking at the memory.
_DEADLINE_S: Final = 60.0


@dataclass(frozen=True)
class Plan:
    """What is moved.

    Attributes:
        footprint_bytes: memory on each side.
        cases: bytes of a block, and blocks of a transfer.
        mixed: blocks of the transfer whose blocks are all of another length.
    """

    footprint_bytes: int
    cases: tuple[tuple[int, int], ...]
    mixed: int


# fmt: off
FULL: Final = Plan(
    128 * _MIB,
    (
        (1, 1), (3, 1), (7, 1), (8, 1), (63, 1), (64, 1), (65, 1), (127, 1), (128, 1), (129, 1), (255, 1), (1000, 1),
        (4095, 1), (4096, 1), (4097, 1), (65_535, 1), (65_536, 1), (65_537, 1), (_MIB - 1, 1), (_MIB, 1), (_MIB + 1, 1),
        (16 * _MIB + 5, 1), (64 * _MIB - 3, 1), (64 * _MIB, 1),
        (1, 1000), (7, 513), (129, 256), (4096, 1024), (4099, 1000), (65_536, 64), (65_537, 31), (_MIB + 1, 16),
        (3 * _MIB + 7, 5),
    ),
    1000,
)
QUICK: Final = Plan(
    4 * _MIB, ((1, 1), (65, 1), (129, 1), (4097, 1), (65_537, 1), (_MIB - 1, 1), (1, 100), (4099, 33)), 50
)
# fmt: on


@dataclass
class _Moved:
    transfers: int = 0
    nbytes: int = 0
    lengths: list[int] = field(default_factory=list)


class _Exchange:
    """Two memories, and what each of them has to hold."""

    def __init__(self, target: Target, engine: TransferEngine, address: str, work: Work, seed: int) -> None:
        nbytes = work.footprint_bytes
        self.random = np.random.default_rng(seed)
        self._target = target
        self._engine = engine
        self._theirs: NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        Pattern(self._theirs, Layout(work, target=True)).fill(_WINDOW)
        self._ours = allocate(nbytes)
        self._ours[:] = self.random.integers(0, 256, nbytes, np.uint8)
        self._expected = self._ours.copy()
        self._region = engine.register(self._ours)
        self.peer = engine.connect(address, timeout=_DEADLINE_S)
        self._remote = self.peer.regions.wait(_REGION, _DEADLINE_S)

    def move(self, op: str, lengths: NDArray[np.int64]) -> str:
        """Make one transfer; return what is wrong afterwards, or ``""``."""
        here, there = self._places(lengths), self._places(lengths)
        pieces = [
            (slice(ours, ours + length), slice(theirs, theirs + length))
            for ours, theirs, length in zip(here.tolist(), there.tolist(), lengths.tolist(), strict=True)
        ]
        for ours, theirs in pieces:
            # No byte is what it has to become, so that one that was not moved is found.
            change = self.random.integers(1, 256, ours.stop - ours.start, np.uint8)
            self._ours[ours] = self._theirs[theirs] ^ change
            if op == "write":
                self._expected[ours] = self._theirs[theirs] = self._ours[ours]
            else:
                self._expected[ours] = self._theirs[theirs]
        post = self._engine.write if op == "write" else self._engine.read
        post(self.peer, self._region, self._remote, here, there, lengths, deadline=_DEADLINE_S).wait(_DEADLINE_S)
        if not np.array_equal(self._ours, self._expected):
            wrong = np.flatnonzero(self._ours != self._expected)
            return f"{len(wrong)} bytes of this side's memory are wrong, the first at {wrong[0]}"
        if self._target.call("digest", _DEADLINE_S) != digest(self._theirs):
            return "the memory of the target is not what it has to be"
        return ""

    def rail_bytes(self) -> dict[str, int]:
        """Return what each rail of this side has carried."""
        return bytes_by_rail(self._engine)

    def _places(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each block lies: anywhere in its part of the memory, the parts in any order."""
        part = len(self._ours) // len(lengths)
        places: NDArray[np.int64] = self.random.permutation(len(lengths)) * part
        return places + self.random.integers(0, part - lengths + 1)


@contextmanager
def _connected(target: Target, place: Place, plan: Plan, tuning: Tuning, seed: int) -> Iterator[_Exchange]:
    work = Work("rdma", "write", _BLOCK, 1, "sequential", 1, None, plan.footprint_bytes, "registered", tuning)
    target.call("open", _DEADLINE_S, work=work.to_json(), window=_WINDOW)
    offer = target.call("offer", _DEADLINE_S, kind="engine", mode="acked", width=0)
    address = str(Address(place.host, int(offer["address"].rpartition(":")[2])))
    options: EngineOptions = {
        **tuning.settings(target=False), "listen": None, "transports": "rdma", "require": "rdma", "secret": place.secret
    }  # fmt: skip
    with TransferEngine("hardware-check", **options) as engine:
        yield _Exchange(target, engine, address, work, seed)
    target.call("close_row")


def correctness(
    target: Target, place: Place, plan: Plan, tuning: Tuning, seed: int, note: Callable[[Step], None]
) -> Step:
    """Make every transfer of the plan in both directions, over nothing but RDMA.

    Args:
        target: the other side.
        place: how it is reached.
        plan: what is moved.
        tuning: the devices.
        seed: of places and contents.
        note: is given what is known so far.
    """
    data: dict[str, Any] = {"seed": seed, "footprint_bytes": plan.footprint_bytes, "transfers": []}
    moved = {op: _Moved() for op in OPS}
    complaints: dict[str, str] = {}
    rails: dict[str, int] = {}
    path = ""

    def step() -> Step:
        checks = [_line(op, moved[op], complaints.get(op, "")) for op in OPS]
        return Step([*checks, _rails_line(rails, path, sum(one.nbytes for one in moved.values()))], data)

    op = OPS[0]
    try:
        with _connected(target, place, plan, tuning, seed) as exchange:
            cases = [np.full(batch, block, np.int64) for block, batch in plan.cases]
            part = plan.footprint_bytes // plan.mixed
            cases.append(exchange.random.integers(1, part, plan.mixed, np.int64))
            for lengths in cases:
                for op in OPS:
                    complaint = exchange.move(op, lengths)
                    one = moved[op]
                    one.transfers += 1
                    one.nbytes += int(lengths.sum())
                    one.lengths += [int(lengths.min()), int(lengths.max())]
                    data["transfers"].append([op, len(lengths), int(lengths.min()), int(lengths.max()), not complaint])
                    if complaint:
                        complaints[op] = f"{len(lengths)} × {lengths.max()} B: {complaint}"
                        return step()
                path = exchange.peer.path
                rails = exchange.rail_bytes()
                note(step())
    except MoonpoolError as error:
        complaints[op] = str(error)
    data["rail_bytes"] = rails
    return step()


def _line(op: str, moved: _Moved, complaint: str) -> Check:
    sizes = f", blocks of {_size(min(moved.lengths))} to {_size(max(moved.lengths))}" if moved.lengths else ""
    figure = f"{moved.transfers} transfers, {moved.nbytes / 1e6:.1f} MB{sizes}"
    result: Result = "failed" if complaint or not moved.transfers else "passed"
    return Check(f"correctness: {op}", result, figure, "every byte of both memories", complaint)


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes % 1024 == 0 else f"{nbytes} B"


def _rails_line(rails: dict[str, int], path: str, nbytes: int) -> Check:
    carried = sum(rails.values())
    figure = f"path {path or 'none'}; " + ", ".join(f"{rail} {count / 1e6:.1f} MB" for rail, count in rails.items())
    good = path == "rdma" and carried >= nbytes > 0
    return Check("correctness: over RDMA", "passed" if good else "failed", figure, f"{nbytes / 1e6:.1f} MB by rails")
