# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a chunk lie in the paged cache of a worker.

A stored chunk is its layers, one after the other in the natural order of their names; of a layer its blocks; of a block
its heads (H), tokens (N) and content (C) in one of two orders, that of the cache. So one layer of a chunk is one range
of it. That holds whatever the strides of the cache are: workers whose caches lie differently read each other's chunks,
only in more pieces.

The namespace says what the scheduler knows of a model. What only workers know (types, shapes, and how their kernels
split a block, by which some order what is in it) is in a *seal* at the end of each chunk. A chunk with another seal is
none of ours.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.connector.ordering import Mark, mark_of
from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import Region, TransferEngine, copy_batch

__all__ = ["SEAL_BYTES", "Area", "CacheLayoutError", "Int64s", "PagedCache", "partial_rows"]

Int64s = npt.NDArray[np.int64]
Spans = tuple[tuple[list[Region], Int64s], Int64s, Int64s, Int64s]
#: Of each range: in which row of the table its chunk is; where the range begins in it; how long it is. And the places.
Parts = tuple[npt.NDArray[np.intp], Int64s, Int64s, Spans]

_HNC: Final = "HNC"
_NHC: Final = "NHC"
#: Of a seal.
SEAL_BYTES: Final = 32
_FORMAT: Final = 1


class CacheLayoutError(MoonpoolError, ValueError):
    """The paged cache lies in memory in a way that the connector does not know, or cannot reach."""

    default_code = "CACHE_LAYOUT"


def _inner_order(kv_cache_layout: str | None) -> str:
    # That of the cache, for long pieces. Where L and B stand in it makes no difference.
    inner = re.sub("[LB]", "", kv_cache_layout or _HNC)
    return _NHC if inner == _NHC else _HNC


@dataclass(frozen=True, slots=True)
class _Pages:
    # The blocks of one layer: block b has its run r, `run_bytes` long, at `offset + b * stride + runs[r]` of a storage.
    storage: int
    offset: int
    stride: int
    runs: tuple[int, ...]
    run_bytes: int


@dataclass(frozen=True, slots=True)
class _Storage:
    address: int
    nbytes: int
    owner: Any


@dataclass(frozen=True, slots=True)
class Area:
    """Registered memory for what of a few chunks does not go into the cache, see `PagedCache.area_bytes`.

    Attributes:
        region: with that memory.
        begin: where in it.
    """

    region: Region
    begin: int


class PagedCache:
    """The paged cache of a worker, registered with its engine. Thread-safe: threads move blocks of their own.

    Args:
        engine: with which each storage is registered once.
        kv_caches: the view ``[blocks, heads, tokens, content]`` of each layer, as vLLM gives them. Layers may share
            storage, blocks may be split, and two names may be the same layer.
        num_blocks: how many the scheduler knows.
        chunk_blocks: of one chunk.
        kv_cache_layout: what vLLM calls the layout of its cache, such as ``LBHNC``. None: it has none.

    Attributes:
        chunk_blocks: of one chunk.
        chunk_bytes: of one chunk, as this worker stores it.
        num_blocks: how many there are.
        layer_of: number of each layer by its name, in the order of the bytes of a chunk. Names may share one.
        layer_bytes: of one chunk, in each layer.
        regions: one for each storage.

    Raises:
        CacheLayoutError: memory of a device that is no NVIDIA GPU, or of several devices, a layer that has no such
            view, or blocks that overlap.
    """

    def __init__(
        self,
        engine: TransferEngine,
        kv_caches: Mapping[str, Any],
        num_blocks: int,
        chunk_blocks: int,
        kv_cache_layout: str | None,
    ) -> None:
        order = _inner_order(kv_cache_layout)
        storages: dict[int, _Storage] = {}
        layers: dict[_Pages, None] = {}
        pages: dict[str, _Pages] = {}
        known: list[object] = [_FORMAT, order]
        for layer in sorted(kv_caches, key=_natural):
            view = kv_caches[layer]
            pages[layer] = _pages_of(layer, view, num_blocks, order, storages)
            layers[pages[layer]] = None
            known.append((layer, view.shape[0] // num_blocks, *view.shape[1:], str(view.dtype)))
        if not layers:
            raise CacheLayoutError("vLLM has no layers with a KV cache", hint="run without the connector")
        self._device = device = _device_of(kv_caches)
        self.num_blocks = num_blocks
        places = {layer: number for number, layer in enumerate(layers)}
        self.layer_of = {layer: places[its] for layer, its in pages.items()}
        numbers = {address: number for number, address in enumerate(storages)}
        for storage in storages.values():
            _check_apart([layer for layer in layers if layer.storage == storage.address], storage, num_blocks)
        self._layers, self._numbers = list(layers), numbers
        self._make_template(chunk_blocks)
        self._shorter: dict[int, PagedCache] = {}
        self._seal = hashlib.sha256(repr(known).encode()).digest()
        self._sealing = engine.allocate(SEAL_BYTES)
        memoryview(self._sealing).cast("B")[:] = self._seal
        self.regions: list[Region] = []
        try:
            for storage in storages.values():
                where = (storage.address, storage.nbytes)
                self.regions.append(engine.register(where if device.type == "cpu" else (*where, str(device))))
        except BaseException:
            self.release()
            raise
        # Registered by address, so the tensors have to stay.
        self._owners = [storage.owner for storage in storages.values()]

    def release(self) -> None:
        """Withdraw the registrations; nothing may be under way."""
        for region in (*self.regions, self._sealing):
            region.release()

    def mark(self) -> Mark:
        """Return the point that the device has been given work up to. What is queued later may touch other blocks."""
        return mark_of(self._device)

    def of(self, chunk_blocks: int) -> PagedCache:
        """Return the same cache for chunks of so many blocks, such as tails; 0: of as many as it has anyway."""
        if chunk_blocks in (0, self.chunk_blocks):
            return self
        shorter = self._shorter.get(chunk_blocks)
        if shorter is None:
            shorter = copy.copy(self)
            shorter._make_template(chunk_blocks)
            self._shorter[chunk_blocks] = shorter
        return shorter

    def pieces(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Return the pieces of any block, in the order of their bytes in a chunk.

        Returns:
            In which storage each is, where it begins for block 0, from block to block, and how long it is.
        """
        one = self.of(1)
        return one._storage[:-1], one._offset[:-1], one._stride[:-1], one._length[:-1]

    def form(self) -> dict[str, Any]:
        """Return what other engines have to know to read blocks of this cache, as JSON has it."""
        pieces = zip(("storage", "offset", "stride", "length"), self.pieces(), strict=True)
        form = {name: column.tolist() for name, column in pieces}
        return {"seal": self._seal.hex(), "storages": len(self.regions), **form}

    def area_bytes(self, chunks: int) -> int:
        """Return how large an `Area` is for so many chunks together: for their seals, and for all of one of them."""
        return self.chunk_bytes + chunks * SEAL_BYTES

    def table(self, block_ids: Sequence[int], begin_block: int = 0) -> Int64s:
        """Return the blocks of each chunk as a row.

        Args:
            block_ids: one after the other.
            begin_block: how many are left out of the first chunk. They are -1 in it, as are those that are missing at
                the end of the last chunk.

        Raises:
            IndexError: there is no such block.
        """
        blocks = np.asarray(block_ids, dtype=np.int64)
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.num_blocks:
            raise IndexError(f"blocks {blocks.min()} to {blocks.max()} of {self.num_blocks}")
        rows = -(-(begin_block + len(blocks)) // self.chunk_blocks)
        table = np.full(rows * self.chunk_blocks, -1, dtype=np.int64)
        table[begin_block : begin_block + len(blocks)] = blocks
        return table.reshape(rows, self.chunk_blocks)

    def values(self, table: Int64s) -> Spans:
        """Return where whole chunks are, as `StoreClient` takes values. The arguments are those of `destinations`."""
        return self._spans(table, self._sealing, np.zeros(len(table), dtype=np.int64))

    def destinations(self, table: Int64s, area: Area) -> Spans:
        """Return where chunks go, as `StoreClient` takes destinations.

        Args:
            table: the blocks of a chunk in each row. One may have blocks left out: it goes to the area as a whole.
            area: has also the seals.
        """
        seals = area.begin + self.chunk_bytes + np.arange(len(table)) * SEAL_BYTES
        (regions, which), where, lengths, counts = self._spans(table, area.region, seals)
        partial = partial_rows(table)
        if not len(partial):
            return (regions, which), where, lengths, counts
        (row,) = partial.tolist()
        begin, end = row * len(self._block), (row + 1) * len(self._block)
        replaced = ((which, len(self.regions)), (where, area.begin), (lengths, self.chunk_bytes))
        which, where, lengths = (np.concatenate([old[:begin], [new], old[end:]]) for old, new in replaced)
        counts[row] = 1
        return (regions, which), where, lengths, counts

    def sealed(self, table: Int64s, area: Area) -> npt.NDArray[np.bool_]:
        """Return which chunks, that have come to these `destinations`, are as this worker stores them."""
        there = np.frombuffer(memoryview(area.region), dtype=np.uint8)[area.begin :]
        seals = there[self.chunk_bytes : self.area_bytes(len(table))].reshape(-1, SEAL_BYTES)
        good: npt.NDArray[np.bool_] = (seals == np.frombuffer(self._seal, dtype=np.uint8)).all(axis=1)
        for row in partial_rows(table).tolist():
            good[row] = there[self.chunk_bytes - SEAL_BYTES : self.chunk_bytes].tobytes() == self._seal
        return good

    def parts(self, table: Int64s, first: int, last: int, seals: Region) -> Parts:
        """Return ranges of chunks, and where they go, for layers from `first` on and before `last`.

        A chunk of which every block goes somewhere is one range; of others each layer is one. Seals come with the last
        layer.

        Args:
            table: the blocks of a chunk in each row, -1 where they are left out. What is left out of a chunk is at its
                beginning or its end.
            first: number of a layer.
            last: number of a layer, or of how many there are.
            seals: where seals go, one after the other.
        """
        sealed = last == len(self.layer_bytes)
        pieces = slice(self._layer_ends[first], self._layer_ends[last] + sealed)
        where = self._offset[pieces] + table[:, self._block[pieces]] * self._stride[pieces]
        used = table[:, self._block[pieces]] >= 0
        if sealed:
            where[:, -1], used[:, -1] = np.arange(len(table)) * SEAL_BYTES, True
        begins = used.copy()
        begins[:, 1:] &= ~used[:, :-1]
        counts = np.bincount(np.cumsum(begins)[used.ravel()] - 1)
        lengths = np.broadcast_to(self._length[pieces], used.shape)[used]
        sizes = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        which = np.broadcast_to(self._storage[pieces], used.shape)[used]
        starts = np.broadcast_to(self._at[pieces], used.shape)[begins]
        return np.nonzero(begins)[0], starts, sizes, (([*self.regions, seals], which), where[used], lengths, counts)

    def are_seals(self, region: Region, begins: Int64s) -> npt.NDArray[np.bool_]:
        """Return whether the seal of this worker is at these places."""
        there = np.frombuffer(memoryview(region), dtype=np.uint8)[begins[:, None] + np.arange(SEAL_BYTES)]
        good: npt.NDArray[np.bool_] = (there == np.frombuffer(self._seal, dtype=np.uint8)).all(axis=1)
        return good

    def scatter(self, table: Int64s, region: Region, begins: Int64s) -> None:
        """Copy whole chunks to their blocks.

        Args:
            table: the blocks of a chunk in each row; -1: not this one.
            region: where the chunks are.
            begins: where in it each of them is.
        """
        targets = table[:, self._block]
        in_cache = self._offset + targets * self._stride
        there = begins[:, None] + self._at
        lengths = np.broadcast_to(self._length, targets.shape)
        for number, storage in enumerate(self.regions):
            here = (targets >= 0) & (self._storage == number)
            copy_batch(storage, in_cache[here], region, there[here], lengths[here])

    def _spans(self, table: Int64s, seals: Region, seals_at: Int64s) -> Spans:
        where = self._offset + table[:, self._block] * self._stride
        where[:, -1] = seals_at
        which = np.broadcast_to(self._storage, where.shape)
        lengths = np.broadcast_to(self._length, where.shape)
        counts = np.full(len(table), len(self._block), dtype=np.int64)
        return ([*self.regions, seals], which.ravel()), where.ravel(), lengths.ravel(), counts

    def _make_template(self, chunk_blocks: int) -> None:
        # The pieces of any chunk, in the order of its bytes: piece p is in block `block[p]` of the chunk, begins at
        # `offset[p] + id of that block * stride[p]` of its storage, and at `at[p]` of the chunk. The last is the seal.
        layers, numbers = self._layers, self._numbers
        counts = [chunk_blocks * len(layer.runs) for layer in layers] + [1]
        blocks = [np.repeat(np.arange(chunk_blocks), len(layer.runs)) for layer in layers]
        offsets = [layer.offset + np.tile(np.array(layer.runs, dtype=np.int64), chunk_blocks) for layer in layers]
        self._layer_ends = [0, *itertools.accumulate(counts[:-1])]
        self._block = np.concatenate([*blocks, [0]])
        self._offset = np.concatenate([*offsets, [0]])
        self._stride = np.repeat([layer.stride for layer in layers] + [0], counts)
        self._length = np.repeat([layer.run_bytes for layer in layers] + [SEAL_BYTES], counts)
        self._at = np.cumsum(self._length) - self._length
        self._storage = np.repeat([numbers[layer.storage] for layer in layers] + [len(numbers)], counts)
        self.chunk_blocks = chunk_blocks
        self.layer_bytes = [chunk_blocks * len(layer.runs) * layer.run_bytes for layer in layers]
        self.chunk_bytes = int(self._length.sum())


def partial_rows(table: Int64s) -> npt.NDArray[np.intp]:
    """Return the rows in which blocks are left out."""
    return np.flatnonzero((table < 0).any(axis=1))


def _check_apart(layers: list[_Pages], storage: _Storage, num_blocks: int) -> None:
    """Refuse layers that are not all inside their storage, or share some of it.

    Two layouts are known to be free of that: one layer after the other, and all of a block before the next block.
    """
    extents = [(_first_runs([layer]), layer.stride) for layer in layers]
    ends = [int(ends.max()) + (num_blocks - 1) * stride for (_, ends), stride in extents]
    if min(layer.offset for layer in layers) < 0 or max(ends) > storage.nbytes:
        raise CacheLayoutError(f"layers of the KV cache end at {max(ends)} of the {storage.nbytes} bytes they are in")
    hulls = sorted((int(begins.min()), end) for ((begins, _), _), end in zip(extents, ends, strict=True))
    one_by_one = all(end <= begin for (_, end), (begin, _) in itertools.pairwise(hulls))
    if one_by_one:
        fine = all(_block_by_block(*runs, stride) or _run_by_run(*runs, stride, num_blocks) for runs, stride in extents)
    else:
        strides = {stride for _, stride in extents}
        fine = len(strides) == 1 and _block_by_block(*_first_runs(layers), strides.pop())
    if not fine:
        raise CacheLayoutError(
            "layers of the KV cache share memory, or lie neither layer by layer nor block by block",
            hint="a model whose layers are all of one KV cache group",
        )


def _first_runs(layers: list[_Pages]) -> tuple[Int64s, Int64s]:
    """Return where the runs of block 0 begin and end, in the order of addresses."""
    begins = np.concatenate([layer.offset + np.array(layer.runs, dtype=np.int64) for layer in layers])
    ends = begins + np.repeat([layer.run_bytes for layer in layers], [len(layer.runs) for layer in layers])
    order = np.argsort(begins)
    return begins[order], ends[order]


def _block_by_block(begins: Int64s, ends: Int64s, stride: int) -> bool:
    return bool((begins[1:] >= ends[:-1]).all()) and int(ends[-1] - begins[0]) <= stride


def _run_by_run(begins: Int64s, ends: Int64s, stride: int, num_blocks: int) -> bool:
    last = ends + (num_blocks - 1) * stride
    return bool((begins[1:] >= last[:-1]).all()) and int((ends - begins).max()) <= stride


def _pages_of(layer: str, view: Any, num_blocks: int, order: str, storages: dict[int, _Storage]) -> _Pages:
    if isinstance(view, (list, tuple)):
        raise CacheLayoutError(
            f"layer {layer} keeps states of its own (Mamba) instead of a KV cache", hint="run without the connector"
        )
    if view.device.type not in ("cpu", "cuda"):
        raise CacheLayoutError(
            f"the KV cache of layer {layer} is in memory of device {view.device}",
            hint="an engine on CPUs or NVIDIA GPUs: no other memory can be moved",
        )
    shape, item_bytes = tuple(view.shape), view.element_size()
    if len(shape) != 4 or num_blocks < 1 or shape[0] % num_blocks:
        raise CacheLayoutError(
            f"the KV cache of layer {layer} has shape {shape} for {num_blocks} blocks, "
            "which is not [blocks, heads, tokens, content]",
            hint="a version of vLLM from 0.29 to 0.33",
        )
    strides = [step * item_bytes for step in view.stride()]
    split = shape[0] // num_blocks
    heads = (shape[1], strides[1])
    tokens = [(split, strides[0]), (shape[2], strides[2])]
    content = (shape[3], strides[3])
    axes = [heads, *tokens, content] if order == _HNC else [*tokens, heads, content]
    runs, run_bytes = _runs(axes, item_bytes)
    storage = view.untyped_storage()
    address = storage.data_ptr()
    storages.setdefault(address, _Storage(address, storage.nbytes(), view))
    # Of a single block the stride means nothing.
    stride = split * strides[0] if num_blocks > 1 else storage.nbytes()
    return _Pages(address, view.data_ptr() - address, stride, runs, run_bytes)


def _device_of(kv_caches: Mapping[str, Any]) -> Any:
    devices = {str(view.device): view.device for view in kv_caches.values()}
    if len(devices) > 1:
        raise CacheLayoutError(
            f"the layers of one worker are in memory of {', '.join(sorted(devices))}", hint="one device for a worker"
        )
    (device,) = devices.values()
    return device


def _runs(axes: list[tuple[int, int]], item_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return (offsets of the contiguous runs of a block in order, bytes of each) of axes (length, stride in bytes)."""
    axes = [axis for axis in axes if axis[0] != 1]
    run_bytes = item_bytes
    while axes and axes[-1][1] == run_bytes:
        run_bytes *= axes.pop()[0]
    runs = np.zeros(1, dtype=np.int64)
    for length, stride in axes:
        runs = (runs[:, None] + np.arange(length) * stride).ravel()
    assert len(runs) == math.prod(length for length, _ in axes)
    return tuple(runs.tolist()), run_bytes


def _natural(layer: str) -> list[tuple[int, str]]:
    # model.layers.2 before model.layers.10
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", layer)]
