# SPDX-License-Identifier: Apache-2.0
"""Keys of chunks, and which of them are known to be in the pool."""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from typing import Any

from moonpool.connector.adapters import Adapters
from moonpool.store_client import ROOT

__all__ = ["Keys", "Known"]


class Keys:
    """Keys of the chunks of requests: vLLM's hash of the last block of each, and the weights of an adapter.

    Args:
        blocks: of one chunk.
        adapters: know those of each request.
    """

    def __init__(self, blocks: int, adapters: Adapters) -> None:
        self._blocks = blocks
        self._adapters = adapters
        self._salt = b""

    def renew(self) -> None:
        """Have other keys from now on: none of them is in the pool yet, and nobody else has them."""
        self._salt = os.urandom(16)

    @property
    def renewed(self) -> bool:
        """Whether only this engine has such keys."""
        return bool(self._salt)

    def count(self, request: Any) -> int:
        """Return how many chunks of a request are full, computed or not."""
        return len(request.block_hashes) // self._blocks

    def some(self, request: Any, begin: int, end: int) -> list[bytes]:
        """Return the keys of these chunks."""
        first = (begin + 1) * self._blocks - 1
        return self._own(request, request.block_hashes[first : end * self._blocks : self._blocks])

    def of_blocks(self, request: Any, blocks: int) -> bytes:
        """Return the key of a tail that ends with this block of a request."""
        return bytes(self._own(request, request.block_hashes[blocks - 1 : blocks])[0])

    def parent(self, request: Any, chunk: int) -> bytes:
        """Return the key of the chunk before this one."""
        return bytes(self.some(request, chunk - 1, chunk)[0]) if chunk else ROOT

    def _own(self, request: Any, hashes: list[bytes]) -> list[bytes]:
        salt = self._salt + self._adapters.identity(request)
        return [hashlib.sha256(salt + one).digest() for one in hashes] if salt else hashes


class Known:
    """Keys that this engine has put into the pool, or is about to. What was not used for longest is forgotten.

    Args:
        most: keys.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._learned: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._learned)

    def saving(self, key: bytes) -> bool:
        """It is on its way. Returns whether it has been there before."""
        before = self._learned.pop(key, None) is not None
        self._learned[key] = math.inf
        if len(self._learned) > self._most:
            self._learned.popitem(last=False)
        return before

    def saved(self, key: bytes, now: float) -> None:
        """It has arrived."""
        if key in self._learned:
            self._learned[key] = now

    def lost(self, key: bytes) -> None:
        """It has not arrived, or is there no more."""
        self._learned.pop(key, None)

    def learned(self, key: bytes) -> float | None:
        """Return when it was seen to arrive, `math.inf` while it is on its way; None: nothing is known."""
        return self._learned.get(key)

    def clear(self) -> None:
        """Forget all."""
        self._learned.clear()
