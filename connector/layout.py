# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a chunk lie in the paged cache of a worker.

A stored chunk is its layers, one after the other in the natural order of their names; of a layer its blocks; of a block
its heads (H), tokens (N) and content (C) in one of two orders, see `name`. So one layer of a chunk is one range of it.
That holds whatever the strides of the cache are, and however its kernels split a block: workers whose caches lie
differently read each other's chunks, only in more pieces.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import Region, TransferEngine, copy_batch

__all__ = ["CacheLayoutError", "Int64s", "PagedCache", "name"]

Int64s = npt.NDArray[np.int64]
Spans = tuple[tuple[list[Region], Int64s], Int64s, Int64s, Int64s]

_HNC: Final = "HNC"
_NHC: Final = "NHC"
_NONE: Final = np.zeros(0, dtype=np.intp)


class CacheLayoutError(MoonpoolError, ValueError):
    """The paged cache lies in memory in a way that the connector does not know, or cannot reach."""

    default_code = "CACHE_LAYOUT"


def name(kv_cache_layout: str | None) -> str:
    """Return the name of the order of bytes in a chunk, which is part of the namespace.

    Args:
        kv_cache_layout: what vLLM calls the layout of its cache, such as ``LBHNC``. None: it has none.
    """
    return f"layer-block-{_inner_order(kv_cache_layout)}"


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

    @property
    def block_bytes(self) -> int:
        return len(self.runs) * self.run_bytes


@dataclass(frozen=True, slots=True)
class _Storage:
    address: int
    nbytes: int
    owner: Any


class PagedCache:
    """The paged cache of a worker, registered with its engine. Thread-safe: threads move blocks of their own.

    Args:
        engine: with which each storage is registered once.
        kv_caches: the view ``[blocks, heads, tokens, content]`` of each layer, as vLLM gives them. Layers may share
            storage, blocks may be split, and two names may be the same layer.
        num_blocks: how many the scheduler knows.
        chunk_blocks: of one chunk.
        kv_cache_layout: as in `name`.

    Attributes:
        chunk_blocks: of one chunk.
        chunk_bytes: of one chunk, as this worker stores it.
        regions: one for each storage.

    Raises:
        CacheLayoutError: memory of a device, a layer that has no such view, or blocks that overlap.
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
        for layer in sorted(kv_caches, key=_natural):
            layers[_pages_of(layer, kv_caches[layer], num_blocks, order, storages)] = None
        if not layers:
            raise CacheLayoutError("vLLM has no layers with a KV cache", hint="run without the connector")
        self._num_blocks = num_blocks
        self.chunk_blocks = chunk_blocks
        numbers = {address: number for number, address in enumerate(storages)}
        for storage in storages.values():
            _check_apart([layer for layer in layers if layer.storage == storage.address], storage, num_blocks)
        self._make_template(list(layers), chunk_blocks, numbers)
        self.regions: list[Region] = []
        try:
            for storage in storages.values():
                self.regions.append(engine.register((storage.address, storage.nbytes)))
        except BaseException:
            self.release()
            raise
        # Registered by address, so the tensors have to stay.
        self._owners = [storage.owner for storage in storages.values()]

    def release(self) -> None:
        """Withdraw the registrations; nothing may be under way."""
        for region in self.regions:
            region.release()

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
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self._num_blocks:
            raise IndexError(f"blocks {blocks.min()} to {blocks.max()} of {self._num_blocks}")
        rows = -(-(begin_block + len(blocks)) // self.chunk_blocks)
        table = np.full(rows * self.chunk_blocks, -1, dtype=np.int64)
        table[begin_block : begin_block + len(blocks)] = blocks
        return table.reshape(rows, self.chunk_blocks)

    def spans(
        self, table: Int64s, partial: npt.NDArray[np.intp] = _NONE, staging: Region | None = None, staged_at: int = 0
    ) -> Spans:
        """Return where chunks are, as `StoreClient` takes values and destinations.

        Args:
            table: the blocks of a chunk in each row.
            partial: rows in which blocks are left out. These chunks are in the staging area, as a whole.
            staging: that area.
            staged_at: where in it they are, one after the other.
        """
        shape = len(table), len(self._block)
        where = self._offset + table[:, self._block] * self._stride
        which = np.broadcast_to(self._storage, shape)
        lengths = np.broadcast_to(self._length, shape)
        counts = np.full(shape[0], shape[1], dtype=np.int64)
        if staging is None or not len(partial):
            return (self.regions, which.ravel()), where.ravel(), lengths.ravel(), counts
        which, lengths = which.copy(), lengths.copy()
        where[partial, 0] = staged_at + np.arange(len(partial)) * self.chunk_bytes
        which[partial, 0], lengths[partial, 0] = len(self.regions), self.chunk_bytes
        counts[partial] = 1
        used = np.ones(shape, dtype=np.bool_)
        used[partial, 1:] = False
        return ([*self.regions, staging], which[used]), where[used], lengths[used], counts

    def scatter(self, table: Int64s, staging: Region, staged_at: int) -> None:
        """Copy what is not left out of staged chunks to its blocks. The arguments are those of `spans`."""
        blocks = table[:, self._block]
        in_cache = self._offset + blocks * self._stride
        staged = staged_at + np.arange(len(table))[:, None] * self.chunk_bytes + self._at
        lengths = np.broadcast_to(self._length, blocks.shape)
        for number, region in enumerate(self.regions):
            here = (blocks >= 0) & (self._storage == number)
            copy_batch(region, in_cache[here], staging, staged[here], lengths[here])

    def _make_template(self, layers: list[_Pages], chunk_blocks: int, numbers: dict[int, int]) -> None:
        # The pieces of any chunk, in the order of its bytes: piece p is in block `block[p]` of the chunk, begins at
        # `offset[p] + id of that block * stride[p]` of its storage, and at `at[p]` of the chunk.
        counts = [chunk_blocks * len(layer.runs) for layer in layers]
        self._block = np.concatenate([np.repeat(np.arange(chunk_blocks), len(layer.runs)) for layer in layers])
        self._offset = np.concatenate(
            [layer.offset + np.tile(np.array(layer.runs, dtype=np.int64), chunk_blocks) for layer in layers]
        )
        self._stride = np.repeat([layer.stride for layer in layers], counts)
        self._length = np.repeat([layer.run_bytes for layer in layers], counts)
        self._at = np.cumsum(self._length) - self._length
        self.chunk_bytes = int(self._length.sum())
        self._storage = np.repeat([numbers[layer.storage] for layer in layers], counts)


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
    if view.device.type != "cpu":
        raise CacheLayoutError(
            f"the KV cache of layer {layer} is in memory of device {view.device}",
            hint="a CPU engine: this version moves CPU memory only",
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
