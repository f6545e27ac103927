# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side knows of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonpool.connector.handover import HandOver
from moonpool.connector.lookups import Lookup

if TYPE_CHECKING:
    from moonpool.connector.prefetch_plan import Fetching

__all__ = ["Tracked"]


@dataclass(slots=True, eq=False)
class Tracked:
    """One request, from when it is added until it has finished. Chunks are counted from the request's beginning.

    Attributes:
        request: vLLM's.
        lookup: the latest question what the pool has of it.
        waiting: since when it is held back for an answer; 0: it is not.
        reason: why nothing is loaded, for the counters.
        local: tokens that vLLM's own cache had when it asked last.
        limit: chunks from this one on are not asked for again, since a load of it has failed.
        loading: first chunk of the load under way; -1: there is none.
        load_end: chunk after the last one of the latest load.
        admitted: tokens that were there when it was admitted: local ones and loaded ones. They may be computed or
            loaded by the very step that it is admitted to. inf: it is not admitted.
        saved: chunks before this one are in the pool, on their way there, or have been tried.
        found: when the pool was asked what made `saved`.
        save_at: with so many tokens computed there may be something to save.
        fetch: what is fetched into host memory for it, or is there.
        chosen: the latest choice: (tokens that vLLM had, those that the pool has beyond, whether these are loaded).
        handed: what another engine has computed of it; None: nothing.
        asked_again: when the pool is asked again for what another engine is saving, of `time.monotonic`.
        borrowed: what another engine lends of it was tried.
        late: not all of that had come when it was waited for no more.
        barred: nothing of it is loaded or saved: the cache was reset after it had begun, or nobody knows which weights
            its adapter has.
    """

    request: Any
    lookup: Lookup | None = None
    waiting: float = 0.0
    reason: str = "absent"
    local: int = 0
    limit: int = 1 << 62
    loading: int = -1
    load_end: int = 0
    admitted: float = math.inf
    saved: int = 0
    found: float = -math.inf
    save_at: int = 0
    fetch: Fetching | None = None
    chosen: tuple[int, int, bool] | None = None
    handed: HandOver | None = None
    asked_again: float = 0.0
    borrowed: bool = False
    late: bool = False
    barred: bool = False
