# SPDX-License-Identifier: Apache-2.0
"""One row of the benchmark: what is moved, in which order, and how it is cut into batches.

Both processes build the same descriptor list from the same few numbers, so only those numbers travel.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moonpool.bench.errors import ControlError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.transfer_engine.settings import EngineOptions

__all__ = ["MEMORIES", "OPS", "ORDERS", "Layout", "Tuning", "Work", "gpu_of", "has_gpu", "is_memory", "mix"]

OPS: Final = ("read", "write")
ORDERS: Final = ("sequential", "random")
#: Beside these there is memory of GPUs, see `gpu_of`.
MEMORIES: Final = ("registered", "allocated")
_GPU: Final = re.compile(r"cuda:([0-9]{1,3})")

# SplitMix64 (https://prng.di.unimi.it/splitmix64.c): the same numbers on every machine and for every numpy version.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well mixed 64-bit number for each of `numbers`; different numbers give different results."""
    z = (numbers + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def gpu_of(memory: str, *, target: bool) -> int | None:
    """Return the GPU whose memory one side of a row has, or None: it has memory of the host.

    Args:
        memory: ``cuda:0`` is a GPU on both sides; ``cuda:0/registered`` one of the initiator, and
            ``registered/cuda:0`` one of the target.
        target: which side.
    """
    side = _GPU.fullmatch(memory.split("/")[-1 if target else 0])
    return None if side is None else int(side[1])


def has_gpu(memory: str) -> bool:
    """Whether either side has memory of a GPU."""
    return gpu_of(memory, target=False) is not None or gpu_of(memory, target=True) is not None


def is_memory(memory: str) -> bool:
    """Whether this is memory that a row can have."""
    sides = memory.split("/")
    known = len(sides) <= 2 and all(side == "registered" or _GPU.fullmatch(side) for side in sides)
    return memory in MEMORIES or (known and has_gpu(memory))


@dataclass(frozen=True)
class Tuning:
    """Settings of the engines of a row. What is None is left to the environment, the settings file and the defaults.

    Attributes:
        devices: RDMA devices of the initiating side, as the setting ``rdma_devices`` has them.
        target_devices: those of the target.
        queue_pairs: for each peer and rail.
        slice_bytes: what a lane takes of a large transfer at once.
        inline_bytes: RDMA writes up to this size travel inside their work request.
        spin_us: how long a waiting thread looks for the result before it sleeps.
    """

    devices: str | None = None
    target_devices: str | None = None
    queue_pairs: int | None = None
    slice_bytes: int | None = None
    inline_bytes: int | None = None
    spin_us: int | None = None

    def settings(self, *, target: bool) -> EngineOptions:
        """Return the arguments of one side's engine."""
        options: EngineOptions = {}
        if (devices := self.target_devices if target else self.devices) is not None:
            options["rdma_devices"] = devices
        if self.queue_pairs is not None:
            options["rdma_queue_pairs"] = self.queue_pairs
        if self.slice_bytes is not None:
            options["slice_bytes"] = self.slice_bytes
        if self.inline_bytes is not None:
            options["rdma_inline_bytes"] = self.inline_bytes
        if self.spin_us is not None:
            options["spin_us"] = self.spin_us
        return options

    @classmethod
    def from_json(cls, fields: Any) -> Tuning:
        """Check what the other process sent.

        Raises:
            ControlError: it is not a tuning that this version knows.
        """
        kinds = {field.name: str if field.name.endswith("devices") else int for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != set(kinds):
            raise ControlError(
                "the other side described its engine in an unknown way", hint="one version on both sides"
            )
        for name, value in fields.items():
            if value is not None and (not isinstance(value, kinds[name]) or isinstance(value, bool)):
                raise ControlError(f"the other side asks for {name}={value!r}", hint="one version on both sides")
        return cls(**fields)


@dataclass(frozen=True)
class Work:
    """What one row moves. Everything in it is agreed between the two processes.

    Attributes:
        transport: ``tcp``, ``rdma``, ``shm``, ``local``; ``rdma,tcp`` and ``auto`` where the engine chooses.
        op: ``read`` (target to initiator) or ``write`` (initiator to target).
        block_bytes: length of one descriptor.
        batch: descriptors of one transfer.
        order: ``sequential``, or ``random``: blocks lie in shuffled places on both sides.
        threads: user threads, each with its own part of the blocks.
        lanes: connections; None lets the engine choose.
        footprint_bytes: memory on each side that the batches cycle through.
        memory: ``registered``: memory that the caller has; ``allocated``: memory that the engine made, on both sides;
            or that of GPUs, see `gpu_of`.
        tuning: settings of the engines.
        depth: transfers that each thread has under way at a time.
    """

    transport: str
    op: str
    block_bytes: int
    batch: int
    order: str
    threads: int
    lanes: int | None
    footprint_bytes: int
    memory: str = "registered"
    tuning: Tuning = Tuning()
    depth: int = 1

    @property
    def blocks_under_way(self) -> int:
        """Blocks that all threads have under way at a time."""
        return self.batch * self.threads * self.depth

    @property
    def batches(self) -> int:
        """Batches of one thread before its blocks repeat."""
        return self.footprint_bytes // (self.block_bytes * self.batch * self.threads)

    @property
    def blocks(self) -> int:
        """Blocks on each side."""
        return self.batches * self.batch * self.threads

    @property
    def batch_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.block_bytes * self.batch

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Work:
        """Check what the other process sent.

        Raises:
            ControlError: it is not a work that this version can do.
        """
        kinds = {"transport": str, "op": str, "order": str, "memory": str}
        if not isinstance(fields, dict) or set(fields) != {field.name for field in dataclasses.fields(cls)}:
            raise ControlError("the other side described its work in an unknown way", hint="one version on both sides")
        fields = {**fields, "tuning": Tuning.from_json(fields["tuning"])}
        for name, value in fields.items():
            optional = name == "tuning" or (name == "lanes" and value is None)
            if not optional and (not isinstance(value, kinds.get(name, int)) or isinstance(value, bool)):
                raise ControlError(f"the other side asks for {name}={value!r}", hint="one version on both sides")
        work = cls(**fields)
        if (
            work.op not in OPS
            or work.order not in ORDERS
            or not is_memory(work.memory)
            or min(work.block_bytes, work.batch, work.threads, work.depth) < 1
            or work.batches < work.depth
        ):
            raise ControlError(f"the other side asks for {work}", hint="one version on both sides")
        return work


class Layout:
    """Where the blocks of a work lie on one side.

    Block ``i`` is at `offsets[i]`. Thread ``t`` has the t-th equal part of the blocks, as batches that follow each
    other; sides differ in their places only.
    """

    def __init__(self, work: Work, *, target: bool) -> None:
        self.work = work
        places = np.arange(work.blocks, dtype=np.uint64)
        if work.order == "random":
            # Sorting by mixed numbers is a shuffle that needs no generator both numpy versions agree on.
            salt = np.uint64(0x7461726765740000 if target else 0x696E697469610000)
            places = np.argsort(mix(places ^ salt), kind="stable").astype(np.uint64)
        self.places: NDArray[np.int64] = places.astype(np.int64)
        self.offsets: NDArray[np.int64] = self.places * work.block_bytes

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """One length per block, all the same."""
        return np.full(self.work.blocks, self.work.block_bytes, dtype=np.int64)

    def batch(self, thread: int, index: int) -> slice:
        """Return which blocks batch `index` of `thread` consists of."""
        first = (thread * self.work.batches + index % self.work.batches) * self.work.batch
        return slice(first, first + self.work.batch)
