# SPDX-License-Identifier: Apache-2.0
"""This project's pool, as its users have it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from moonpool.bench.pool.loading import NAMESPACE, Loader, batches_of
from moonpool.bench.pool.moving import row_of
from moonpool.bench.pool.opening import PoolOptions
from moonpool.bench.pool.peers.base import GROUPS, FreshRow, LookRow, PeerOptions, PoolBackend, PoolRow
from moonpool.bench.pool.place import PoolPlace
from moonpool.bench.pool.processes import MasterProcess, store_in
from moonpool.bench.pool.work import StoreWork
from moonpool.cluster import OPEN
from moonpool.store_client import StoreClient

if TYPE_CHECKING:
    from moonpool.bench.work import Work

__all__ = ["MoonpoolPool"]

_LEASE_SECONDS: Final = 1.0


class MoonpoolPool(PoolBackend):
    """A master and a node for rows that move bytes; a master and a node in name only for the others."""

    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()
        self._place: PoolPlace | None = None
        self._asked: tuple[Loader, StoreClient] | None = None

    def row(self, work: Work, number: Callable[[], int]) -> PoolRow:
        """See `PoolBackend`."""
        if work.transport == "master":
            return self._asking(work)
        if self._place is None:
            options = PoolOptions(dram=self._options.dram, metadata=self._options.metadata)
            self._place = self._stack.enter_context(PoolPlace(options))
        moved = StoreWork(
            work.op,
            work.block_bytes,
            work.batch,
            replicas=1,
            threads=work.threads,
            memory="registered",
            located="asked",
            footprint_bytes=work.footprint_bytes,
        )
        return row_of(self._place, moved, number)

    def close(self) -> None:
        """See `PoolBackend`."""
        self._stack.close()

    def _asking(self, work: Work) -> PoolRow:
        if self._asked is None:
            folder = self._stack.enter_context(TemporaryDirectory(prefix="mooncake-bench-"))
            master = self._stack.enter_context(MasterProcess(store_in(self._options.metadata, folder)))
            loader = self._stack.enter_context(Loader(master.address))
            self._asked = loader, self._stack.enter_context(StoreClient(master.address, name="mooncake-bench", **OPEN))
        loader, client = self._asked
        if work.op == "put":
            return _PutRow(work, loader)
        hashes = os.urandom(32 * work.batch * GROUPS)
        chains = batches_of(hashes, work.batch)
        for chain in chains:
            loader.put(chain)
        if work.op == "exists":
            return LookRow(
                work, lambda chain: bool(client.exists(NAMESPACE, chain).all()), chains, lambda: loader.remove(hashes)
            )
        return LookRow(
            work,
            lambda chain: client.match_prefix(NAMESPACE, chain, lease=_LEASE_SECONDS) == work.batch,
            chains,
            lambda: loader.remove(hashes),
        )


class _PutRow(FreshRow):
    """PutStart and PutCommit."""

    def __init__(self, work: Work, loader: Loader) -> None:
        super().__init__(work)
        self._loader = loader

    def _fresh(self) -> Sequence[bytes]:
        return batches_of(os.urandom(32 * self._work.batch * self._work.batches), self._work.batch)

    def _put(self, batch: bytes) -> None:
        self._loader.put_batch(batch)

    def _settle(self, put: Sequence[bytes]) -> None:
        hashes = b"".join(put)
        if (there := self._loader.remove(hashes)) != len(hashes) // 32:
            self._complain(f"{there} of {len(hashes) // 32} chunks that were put were there")
