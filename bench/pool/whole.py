# SPDX-License-Identifier: Apache-2.0
"""What a master with many chunks takes: memory, and the time to be there again after ``kill -9``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from moonpool.bench.errors import BenchError
from moonpool.bench.pool.loading import AT_ONCE, Loader, batches_of
from moonpool.bench.pool.processes import MasterProcess, store_in
from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb

__all__ = ["measure_memory", "measure_recovery"]

Show = Callable[[str], None]
#: Loaded and shown at once.
_STEP: Final = 50 * AT_ONCE
_HITS_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.01
#: What an allocator and a store give back, they give back within this time, or not at all.
_SETTLE_SECONDS: Final = 5.0
_SETTLED_BYTES: Final = 256 << 10


def _load(loader: Loader, hashes: bytes, show: Show) -> float:
    """Put chunks; return how many in a second."""
    began = time.monotonic()
    for number, some in enumerate(batches_of(hashes, _STEP)):
        show(f"{number * _STEP:,} of {len(hashes) // 32:,} chunks loaded")
        loader.put(some)
    return len(hashes) / 32 / (time.monotonic() - began)


def _settled(master: MasterProcess) -> int:
    """Return the resident memory when it has stopped to shrink."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    size = master.rss_bytes
    while time.monotonic() < deadline:
        time.sleep(_SETTLE_SECONDS / 5)
        before, size = size, master.rss_bytes
        if abs(before - size) < _SETTLED_BYTES:
            break
    return size


def measure_memory(store: str, chunks: int, show: Show) -> dict[str, Any]:
    """Return what the memory of a master grows by with each chunk, and what is left of that when they are removed.

    Args:
        store: of the master.
        chunks: how many.
        show: says what happens.
    """
    hashes = os.urandom(32 * chunks)
    with MasterProcess(store) as master, Loader(master.address) as loader:
        # Code, buffers and caches that are there from the first calls on are not those of the chunks.
        first = os.urandom(32 * AT_ONCE)
        loader.put(first)
        loader.remove(first)
        empty = _settled(master)
        rate = _load(loader, hashes, show)
        show("looking at every chunk")
        there = loader.hits(hashes)
        full = _settled(master)
        index = json.loads(loader.call("Stats", pb.StatsRequest()).json)["index"]
        show("removing every chunk")
        removed = loader.remove(hashes)
        after = _settled(master)
    return {
        "chunks": chunks,
        "rss_empty_bytes": empty,
        "rss_full_bytes": full,
        "rss_removed_bytes": after,
        "bytes_per_chunk": (full - empty) / chunks,
        "index_bytes_per_chunk": index["memory_bytes"] / chunks,
        "bytes_per_chunk_after_removal": (after - empty) / chunks,
        "chunks_loaded_per_s": rate,
        "verified": there == removed == chunks,
    }


def measure_recovery(chunks: int, show: Show) -> dict[str, Any]:
    """Return how long a master with SQLite takes from its start until every chunk is a hit again, after ``kill -9``.

    Args:
        chunks: how many.
        show: says what happens.

    Raises:
        BenchError: they are no hits for minutes.
    """
    hashes = os.urandom(32 * chunks)
    with TemporaryDirectory(prefix="mooncake-bench-") as folder:
        store = store_in("sqlite", folder)
        master = MasterProcess(store)
        try:
            with Loader(master.address) as loader:
                rate = _load(loader, hashes, show)
                show("noting where every chunk is")
                before = loader.extents(hashes)
                file_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
                show("kill -9, and a new start")
                address = master.address
                master.kill()
                began = time.monotonic()
                master = MasterProcess(store, address)
                serving = time.monotonic() - began
                _await_hits(loader, hashes, began)
                recovered = time.monotonic() - began
                same = loader.extents(hashes) == before
        finally:
            master.end()
    return {
        "chunks": chunks,
        "store_bytes": file_bytes,
        "serving_s": serving,
        "all_hits_s": recovered,
        "chunks_loaded_per_s": rate,
        "verified": same,
    }


def _await_hits(loader: Loader, hashes: bytes, began: float) -> None:
    """Return when every chunk is a hit."""
    for some in batches_of(hashes, _STEP):
        while True:
            try:
                missing = len(some) // 32 - loader.hits(some)
            except MoonpoolError as error:
                if not error.retryable:
                    raise
                missing = len(some) // 32
            if missing == 0:
                break
            if time.monotonic() - began > _HITS_SECONDS:
                raise BenchError(
                    f"{missing} chunks of {len(some) // 32} are no hits {_HITS_SECONDS:.0f} s after the start"
                )
            # The node has to find the new master first.
            time.sleep(_LOOK_SECONDS)
