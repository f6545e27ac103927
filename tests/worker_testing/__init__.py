# SPDX-License-Identifier: Apache-2.0
"""Paged caches as vLLM lays them out, with and without torch, and a slow second opinion of where their bytes are."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment] # the tests run without it too

HAS_TORCH = torch is not None


class ArrayTensor:
    """An array with the few methods of a tensor that the connector calls."""

    def __init__(self, array: npt.NDArray[Any], storage: npt.NDArray[Any]) -> None:
        self.array = array
        self.device = types.SimpleNamespace(type="cpu")
        self.shape = array.shape
        self.dtype = array.dtype
        self._storage = storage

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def untyped_storage(self) -> Any:
        address = int(self._storage.__array_interface__["data"][0])
        return types.SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: self._storage.nbytes)


@dataclass
class Cache:
    """A cache of `layers` x `blocks`, of which each block has [heads, tokens, content] items of 2 bytes.

    Attributes:
        layout: in which order the axes lie in memory, the outermost first.
        split: blocks of a kernel in one block of the scheduler. Only where blocks are dense.
        padding: bytes before the first layer.
    """

    layout: str = "LBHNC"
    layers: int = 3
    blocks: int = 8
    heads: int = 2
    tokens: int = 4
    content: int = 6
    split: int = 1
    padding: int = 0
    with_torch: bool = HAS_TORCH
    storage: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        sizes = dict(
            zip("LBHNC", (self.layers, self.blocks * self.split, self.heads, self.tokens, self.content), strict=True)
        )
        step, self._steps = 1, {}
        for axis in reversed(self.layout):
            self._steps[axis] = step
            step *= sizes[axis]
        self._sizes = sizes
        self.storage = np.zeros(self.padding + 2 * step, dtype=np.uint8)

    def fill(self, seed: int) -> Cache:
        self.storage[:] = np.random.default_rng(seed).integers(0, 256, self.storage.nbytes, dtype=np.uint8)
        return self

    def array(self, layer: int) -> npt.NDArray[np.uint16]:
        items = self.storage[self.padding :].view(np.uint16)
        return np.lib.stride_tricks.as_strided(
            items[layer * self._steps["L"] :],
            tuple(self._sizes[axis] for axis in "BHNC"),
            tuple(2 * self._steps[axis] for axis in "BHNC"),
        )

    def views(self) -> dict[str, Any]:
        """What vLLM would give to `register_kv_caches`."""
        views: dict[str, Any] = {}
        for layer in range(self.layers):
            if self.with_torch:
                whole = torch.from_numpy(self.storage)[self.padding :].view(torch.uint16)
                view: Any = whole.as_strided(
                    tuple(self._sizes[axis] for axis in "BHNC"),
                    tuple(self._steps[axis] for axis in "BHNC"),
                    whole.storage_offset() + layer * self._steps["L"],
                )
            else:
                view = ArrayTensor(self.array(layer), self.storage)
            views[f"model.layers.{layer}.attn"] = view
        return views

    def chunk(self, blocks: list[int], *, tokens_first: bool = False) -> bytes:
        """The bytes of the chunk in these blocks, layer by layer."""
        parts = []
        for layer in range(self.layers):
            array = self.array(layer)
            for block in blocks:
                kernel_blocks = array[block * self.split : (block + 1) * self.split]  # [split, H, N, C]
                # All tokens of a block, of whichever of the kernel's blocks.
                whole = kernel_blocks.transpose(1, 0, 2, 3).reshape(self.heads, -1, self.content)
                parts.append((whole.transpose(1, 0, 2) if tokens_first else whole).tobytes())
        return b"".join(parts)
