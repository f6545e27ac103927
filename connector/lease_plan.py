# SPDX-License-Identifier: Apache-2.0
"""Which blocks a prefill engine keeps for decode engines that read them, and which of these this engine reads."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonpool.connector.jobs import TOKEN_BYTES, LendJob, Lent
from moonpool.connector.lending import SLOTS
from moonpool.connector.settings import ConnectorSettings

__all__ = ["Holds", "Leases", "digest_of"]


def digest_of(key: bytes, block_ids: list[int]) -> bytes:
    """Return what stands for blocks and what is in them: the key of the last of them says that."""
    return hashlib.sha256(key + np.array(block_ids, dtype="<i8").tobytes()).digest()


@dataclass(slots=True)
class _Lease:
    """Blocks that are lent.

    Attributes:
        slot: in the table.
        blocks: which are kept from being used again.
        until: when nobody has needed them for too long.
        workers: how many have not wiped the slot yet, once they were told to; 0: they were not.
    """

    slot: int
    blocks: list[Any]
    until: float
    workers: int = 0


class Leases:
    """Keeps the blocks that this engine lends, each lease until it is given back or nobody renews it.

    Args:
        settings: of the connector.
        workers: that have to wipe a slot before its blocks are free.
        counts: of the scheduler side.
    """

    def __init__(self, settings: ConnectorSettings, workers: int, counts: Counter[str]) -> None:
        self._settings = settings
        self._workers = workers
        self._counts = counts
        self._pool: Any = None
        self._blocks_max = 0
        self._slots = list(range(SLOTS))
        self._open: dict[bytes, _Lease] = {}
        self._ending: dict[int, _Lease] = {}
        self._blocks = 0
        self._jobs: list[LendJob] = []
        self._wiped: list[int] = []
        #: Where the workers are, in the order of their shards. None of them: nothing is lent.
        self.peers: tuple[tuple[str, str], ...] = ()

    def bind(self, pool: Any) -> None:
        """Take the block pool of the engine."""
        self._pool = pool
        self._blocks_max = int(self._settings.peer_blocks_max * pool.num_gpu_blocks)

    @property
    def pending(self) -> bool:
        """Whether blocks are kept."""
        return bool(self._open or self._ending)

    @property
    def blocks(self) -> int:
        """How many blocks are kept."""
        return self._blocks

    def lend(self, block_ids: list[int], key: bytes) -> Lent | None:
        """Lend blocks, of which the last has this key. None: nobody can read them, or too many are lent."""
        if not self.peers or not block_ids:
            return None
        if not self._slots or self._blocks + len(block_ids) > self._blocks_max:
            self._counts["leases_refused"] += 1
            return None
        slot, token, seconds = self._slots.pop(), os.urandom(TOKEN_BYTES), self._settings.peer_lease
        blocks = [self._pool.blocks[one] for one in block_ids]
        self._pool.touch(blocks)
        self._blocks += len(blocks)
        self._open[token] = _Lease(slot, blocks, time.monotonic() + seconds)
        digest = digest_of(key, block_ids)
        self._jobs.append(LendJob(slot, token, digest))
        self._counts["leases_granted"] += 1
        return Lent(self.peers, slot, token, digest, list(block_ids), seconds)

    def heard(self, renewed: Iterable[bytes], returned: Iterable[bytes]) -> None:
        """Some leases are still needed, others no more."""
        until = time.monotonic() + self._settings.peer_lease
        for token in renewed:
            if (lease := self._open.get(token)) is not None:
                lease.until = until
        for token in returned:
            if token in self._open:
                self._counts["leases_returned"] += 1
                self._end(token)

    def expire(self) -> None:
        """End leases that nobody has renewed."""
        if not self._open:
            return
        now = time.monotonic()
        for token in [token for token, lease in self._open.items() if lease.until <= now]:
            self._counts["leases_expired"] += 1
            self._end(token)

    def end(self) -> None:
        """End all: what is in the blocks is not to be used any more."""
        for token in list(self._open):
            self._end(token)

    def wiped(self, slots: dict[int, int]) -> None:
        """Workers have wiped slots: so many of them each."""
        for slot, workers in slots.items():
            lease = self._ending[slot]
            lease.workers -= workers
            if lease.workers <= 0:
                del self._ending[slot]
                self._blocks -= len(lease.blocks)
                self._slots.append(slot)
                # As vLLM frees a request: those that come last are used again first.
                self._pool.free_blocks(reversed(lease.blocks))

    def told(self) -> tuple[list[LendJob], list[int]]:
        """Return what is to be told to the workers: what is lent, and slots that are to be wiped."""
        told = self._jobs, self._wiped
        self._jobs, self._wiped = [], []
        return told

    def _end(self, token: bytes) -> None:
        lease = self._open.pop(token)
        lease.workers = self._workers
        self._ending[lease.slot] = lease
        self._wiped.append(lease.slot)


class Holds:
    """What other engines lend to requests of this one, each until its load has ended or it needs none."""

    def __init__(self) -> None:
        self._open: dict[str, bytes] = {}
        self._begun: list[Lent] = []
        self._ended: list[bytes] = []

    @property
    def untold(self) -> bool:
        """Whether other engines keep blocks for nobody, and the workers have not been told."""
        return bool(self._ended)

    def begin(self, request_id: str, lent: Lent) -> None:
        """A request needs what is lent."""
        self._open[request_id] = lent.token
        self._begun.append(lent)

    def end(self, request_id: str) -> None:
        """A request needs it no more. Again: nothing."""
        token = self._open.pop(request_id, None)
        if token is not None:
            self._ended.append(token)

    def told(self) -> tuple[list[Lent], list[bytes]]:
        """Return what is to be told to the workers: what is needed, and what is needed no more."""
        told = self._begun, self._ended
        self._begun, self._ended = [], []
        return told
