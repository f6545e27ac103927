# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``mooncake.store``: a store in a dictionary. ``STAND_IN`` makes it bad in one way."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

BAD = os.environ.get("STAND_IN", "")


class MooncakeDistributedStore:
    def __init__(self) -> None:
        self._chunks: dict[str, bytes] = {}
        self._started: set[str] = set()
        self._pools: list[mmap.mmap] = []

    def setup(self, host: str, metadata: str, lent: int, local: int, protocol: str, devices: str, master: str) -> int:
        assert (host, metadata, lent, protocol) == ("127.0.0.1", "P2PHANDSHAKE", 0, "tcp")
        return 0

    def setup_dummy(self, pool: int, local: int, address: str) -> int:
        self._pool = pool
        return 0

    def alloc_from_mem_pool(self, nbytes: int) -> int:
        assert nbytes <= self._pool
        self._pools.append(mmap.mmap(-1, nbytes))
        return int(np.frombuffer(self._pools[-1], dtype=np.uint8).ctypes.data)

    def register_buffer(self, pointer: int, size: int) -> int:
        return 0

    def put_from(self, key: str, pointer: int, size: int) -> int:
        self._chunks[key] = ctypes.string_at(pointer, size)
        return 0

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        return [self.put_from(*one) for one in zip(keys, pointers, sizes, strict=True)]

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        if BAD == "get":
            return [-800] * len(keys)
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            ctypes.memmove(pointer, self._chunks[key], size)
            if BAD == "bytes":
                ctypes.c_ubyte.from_address(pointer).value ^= 1
        return sizes

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self._chunks) for key in keys]

    def batch_put_session_start(self, keys: list[str], sizes: list[int]) -> list[int]:
        self._started.update(keys)
        return [0] * len(keys)

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self._chunks.update((key, b"") for key in keys if key in self._started)
        return [0] * len(keys)

    def remove(self, key: str, force: bool) -> int:
        del self._chunks[key]
        return 0

    def remove_all(self, force: bool) -> int:
        self._chunks.clear()
        return 0

    def close(self) -> None:
        self._chunks.clear()
