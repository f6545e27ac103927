# SPDX-License-Identifier: Apache-2.0
"""Where chunks are, as the master has said under a lease that still runs: a get of them needs not ask again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.store_client.packing import EXTENT, HASH_BYTES, NO_SEGMENT

if TYPE_CHECKING:
    from moonpool.store_client.packing import Records
    from moonpool.store_client.rpc import MasterIdentity

__all__ = ["Locations"]

_ROWS_FIRST: Final = 1024


class Locations:
    """A bounded table. Thread-safe.

    It is emptied when it is full, and when another master, or the same one started anew, answers. What is in it is
    what a reply was: whoever reads there checks lease, header and digest as ever.

    Args:
        chunks_max: how many it holds; 0: none.
    """

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._lock = threading.Lock()
        self._master: MasterIdentity | None = None
        #: Grows with everything that is forgotten.
        self.forgotten = 0
        self._used = 0
        self._empty()

    def find(
        self, namespace: str, shard: int, hashes: bytes, master: MasterIdentity | None, least: float
    ) -> tuple[Records, float] | None:
        """Return the extents of chunks and until when their leases run; None unless all of them are known.

        Args:
            namespace: of the chunks.
            shard: whose extents.
            hashes: packed.
            master: who answered last.
            least: the leases must run until then (`time.monotonic`).
        """
        with self._lock:
            known = self._known.get((namespace, shard))
            if known is None or master != self._master:
                return None
            try:
                rows = np.fromiter(map(known.__getitem__, _split(hashes)), np.intp, len(hashes) // HASH_BYTES)
            except KeyError:
                return None
            until = float(self._until[rows].min(initial=np.inf))
            return (self._extents[rows], until) if until >= least else None

    def keep(
        self,
        namespace: str,
        shard: int,
        hashes: bytes,
        extents: Records,
        until: float,
        master: MasterIdentity,
        forgotten: int,
    ) -> None:
        """Remember extents, one row for each chunk, and forget what was known of those that are not there.

        What is known of other shards of a chunk is forgotten too when this one is another than it was.

        Args:
            namespace: of the chunks.
            shard: whose extents.
            hashes: packed.
            extents: where they are. One without a first replica is not there, and not kept.
            until: the end of their leases (`time.monotonic`).
            master: who has said so.
            forgotten: as it was when the master was asked. Where it has grown, the reply may be older than that.
        """
        count, replicas = extents.shape
        with self._lock:
            if forgotten != self.forgotten:
                return
            self._contradicted(namespace, shard, hashes, extents)
            if count > self._chunks_max:
                return
            if master != self._master or self._used + count > self._chunks_max:
                self._empty()
                self._master = master
            self._reserve(self._used + count, replicas)
            begin, self._used = self._used, self._used + count
            self._extents[begin : self._used, :replicas] = extents
            self._until[begin : self._used] = until
            there = (extents["segment"][:, 0] != NO_SEGMENT).tolist()
            known = self._known.setdefault((namespace, shard), {})
            known.update((one, begin + row) for row, one in enumerate(_split(hashes)) if there[row])

    def _contradicted(self, namespace: str, shard: int, hashes: bytes, extents: Records) -> None:
        known = self._known.get((namespace, shard), {})
        generations = extents["generation"][:, 0].tolist()
        there = (extents["segment"][:, 0] != NO_SEGMENT).tolist()
        changed = [
            one
            for one, is_there, generation in zip(_split(hashes), there, generations, strict=True)
            if not is_there
            or ((row := known.get(one)) is not None and self._extents["generation"][row, 0] != generation)
        ]
        if changed:
            self._forget(namespace, changed)

    def forget(self, namespace: str, hashes: bytes) -> None:
        """These chunks may be elsewhere, or nowhere."""
        with self._lock:
            self.forgotten += 1
            self._forget(namespace, _split(hashes))

    def _forget(self, namespace: str, hashes: list[bytes]) -> None:
        for (name, _), known in self._known.items():
            if name == namespace:
                for one in hashes:
                    known.pop(one, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self.forgotten += 1
            self._empty()

    def _empty(self) -> None:
        self._known: dict[tuple[str, int], dict[bytes, int]] = {}
        self._extents: Records = np.empty((0, 1), dtype=EXTENT)
        self._until = np.empty(0)
        self._used = 0

    def _reserve(self, rows: int, replicas: int) -> None:
        room, columns = self._extents.shape
        if rows <= room and replicas <= columns:
            return
        wider = np.zeros((min(max(rows, 2 * room, _ROWS_FIRST), self._chunks_max), max(replicas, columns)), EXTENT)
        wider["segment"] = NO_SEGMENT
        wider[: self._used, :columns] = self._extents[: self._used]
        until = np.zeros(len(wider))
        until[: self._used] = self._until[: self._used]
        self._extents, self._until = wider, until


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
