# SPDX-License-Identifier: Apache-2.0
"""Which tokens a request gets from the pool."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

from moonpool.connector.choice import Choice
from moonpool.connector.keys import Keys
from moonpool.connector.lookups import Lookups
from moonpool.connector.metadata import Lent, LoadJob
from moonpool.connector.prefetch_plan import Fetches
from moonpool.connector.settings import ConnectorSettings
from moonpool.connector.tracked import Tracked

__all__ = ["Loads"]

# How often the pool is asked for what another engine is saving: the less often, the longer it has been waited for.
_AGAIN_MIN: Final = 0.002
_AGAIN_MAX: Final = 0.05
_AGAIN_SHARE: Final = 0.25


@dataclass(slots=True)
class _Filling:
    """A load that the step waits for.

    Attributes:
        block: which block of the request is the first to be loaded.
        first: the hash of that block.
        block_ids: it and all that come after it.
        chunk: which chunk of the request is the first.
        chunks: how many are loaded.
    """

    block: int
    first: bytes
    block_ids: list[int]
    chunk: int
    chunks: int


class Loads:
    """Asks what the pool has, answers vLLM from that, and plans the loads that vLLM then wants.

    No method waits, and asking the same again gives the same as long as the pool has said nothing new.

    Args:
        lookups: where to ask.
        keys: of chunks.
        settings: of the connector.
        block_tokens: tokens of one block.
        counts: hits and misses by reason are counted here.
        workers: how many of them load.
    """

    def __init__(
        self,
        lookups: Lookups,
        keys: Keys,
        settings: ConnectorSettings,
        block_tokens: int,
        counts: Counter[str],
        workers: int,
    ) -> None:
        self._lookups = lookups
        self._keys = keys
        self._settings = settings
        self._block_tokens = block_tokens
        self._blocks = settings.chunk_tokens // block_tokens
        self._counts = counts
        self._is_async = settings.load_mode == "async"
        self.fetches = Fetches(keys, workers)
        self.choice = Choice(settings, counts) if settings.load_choice == "adaptive" else None
        self._fetches_first = settings.load_mode == "prefetch"
        self._filling: dict[str, _Filling] = {}
        self._pool: Any = None
        self._jobs: list[LoadJob] = []
        self._cancelled: list[str] = []

    def bind(self, pool: Any) -> None:
        """Take the block pool of the engine."""
        self._pool = pool

    def ask(self, tracked: Tracked) -> None:
        """Ask what the pool has of a request that is new."""
        chunks = self._wanted(tracked)
        if chunks and self._lent(tracked) is None:
            tail = chunks > self._keys.count(tracked.request)
            tracked.lookup = self._lookups.ask(self._hashes(tracked, 0, chunks), tail=tail)

    def in_background(self, tracked: Tracked) -> bool:
        """Return whether a request is loaded while others run: in one mode all are, and in each what is handed over."""
        return self._is_async or tracked.handed is not None

    def matched(self, tracked: Tracked, local: int) -> int | None:
        """Return how many tokens the pool has beyond the local ones; None: it has not answered yet."""
        tracked.local = local
        if self._is_filled_now(tracked.request, local):
            return None
        found = self._found(tracked, local) if tracked.fetch is None else self._fetched(tracked, local)
        if found is None:
            return None
        tracked.waiting = 0.0
        request, step = tracked.request, self._block_tokens
        # The last token is computed in any case, and with it the rest of its block: a block that is loaded is never
        # written to.
        end = min(self._tokens(tracked, found), (request.num_tokens - 1) // step * step)
        tokens = end - local
        if tokens <= 0 or tokens < self._settings.load_tokens_min:
            if found:
                tracked.reason = "local" if tokens <= 0 else "short"
            self.fetches.drop(tracked)
            return 0
        if tracked.fetch is not None or tracked.handed is not None:
            return int(tokens)
        if not self._is_chosen(tracked, local, tokens):
            tracked.reason = "slower"
            return 0
        if self._fetches_first:
            self._fetch(tracked, local, end)
            return None
        return int(tokens)

    def admit(self, tracked: Tracked, block_ids: list[int], tokens: int) -> None:
        """Plan the load of a request that is admitted with so many tokens from the pool, maybe none."""
        if not tokens:
            self.fetches.drop(tracked)
            self._counts["misses_" + tracked.reason] += 1
            return
        size, step = self._settings.chunk_tokens, self._block_tokens
        begin, end = tracked.local, tracked.local + tokens
        first, last, whole = begin // size, -(-end // size), self._keys.count(tracked.request)
        tracked.loading, tracked.load_end = first, last
        tracked.saved = max(tracked.saved, min(last, whole))
        tracked.chosen = None
        fetched = self._fetches_first and tracked.handed is None
        if self.choice is not None and not fetched:
            self.choice.load_begins(tracked.request.request_id, tokens)
        self._counts["hits"] += 1
        self._counts["hit_tokens"] += tokens
        if tracked.handed is not None:
            self._counts["handovers_taken"] += 1
        lent = self._lent(tracked)
        if lent is not None:
            tracked.borrowed = True
            lent = replace(lent, block_ids=lent.block_ids[begin // step : end // step])
        if not self.in_background(tracked):
            block = begin // step
            first_hash = tracked.request.block_hashes[block]
            self._filling[tracked.request.request_id] = _Filling(
                block, first_hash, block_ids[block:], first, last - first
            )
        self._jobs.append(
            LoadJob(
                request_id=tracked.request.request_id,
                hashes=self._hashes(tracked, first, last),
                begin_block=(begin - first * size) // step,
                block_ids=block_ids[begin // step : end // step],
                is_async=self.in_background(tracked),
                timeout=self._settings.load_timeout,
                fetch_id=self.fetches.take(tracked) if fetched else 0,
                tail_blocks=self._tail(tracked) if last > whole else 0,
                lent=lent,
            )
        )

    def loaded(self, request_id: str, tracked: Tracked | None, chunks: int) -> None:
        """A load has ended, on some worker, with so many good chunks. None: its request was aborted before."""
        filling = self._filling.pop(request_id, None)
        if filling is not None and chunks < filling.chunks:
            # vLLM leaves them in its own cache, for the request to fill them yet. If it is aborted first, others would
            # take what is in them for their prefix.
            good = max(0, (filling.chunk + chunks) * self._settings.chunk_tokens // self._block_tokens - filling.block)
            self._pool.evict_blocks(set(filling.block_ids[good:]))
        if tracked is None or tracked.loading < 0:
            return
        good = tracked.loading + chunks
        if not self.in_background(tracked):
            tracked.loading = -1
        if good < tracked.load_end:
            # Whatever the pool says: it is not asked for that again, or the request would go in circles. Once they are
            # computed, these chunks may be saved.
            tracked.limit = min(tracked.limit, good)
            tracked.saved, tracked.save_at = min(tracked.saved, good), 0

    def finished(self, tracked: Tracked, *, parked: bool) -> None:
        """A request needs nothing any more; `parked`: it still waits for a load."""
        self.fetches.drop(tracked)
        if tracked.lookup is not None:
            tracked.lookup.abandoned = True
        if parked:
            self._cancelled.append(tracked.request.request_id)

    def take(self) -> tuple[list[LoadJob], list[str]]:
        """Return what is to be told to the workers: loads, and requests that need theirs no more."""
        taken = self._jobs, self._cancelled
        self._jobs, self._cancelled = [], []
        return taken

    def heed(self, tracked: Tracked) -> None:
        """Take what the pool has said for what needs not be saved."""
        lookup = tracked.lookup
        if lookup is None or lookup.answer is None or lookup.problem or lookup.asked == tracked.found:
            return
        tracked.found, tracked.saved, tracked.save_at = lookup.asked, min(lookup.answer, lookup.chunks - lookup.tail), 0

    # ---------------------------------------------------------------- inside

    def _is_filled_now(self, request: Any, local: int) -> bool:
        """Whether vLLM's own cache has blocks of this request only in that a step under way loads them.

        vLLM puts them there before it is known that the load succeeds (not those of loads in the background).
        """
        blocks = local // self._block_tokens
        return any(
            one.block < blocks and request.block_hashes[one.block] == one.first for one in self._filling.values()
        )

    def _is_chosen(self, tracked: Tracked, local: int, tokens: int) -> bool:
        """Whether these tokens are to be loaded: chosen once, until vLLM or the pool has others."""
        if self.choice is None:
            return True
        if tracked.chosen is None or tracked.chosen[:2] != (local, tokens):
            tracked.chosen = local, tokens, self.choice.loads(tracked.request.request_id, tokens)
        return tracked.chosen[2]

    def _fetch(self, tracked: Tracked, local: int, end: int) -> None:
        size, timeout = self._settings.chunk_tokens, self._settings.load_timeout
        first, last = local // size, -(-end // size)
        if self.choice is not None:
            # As long as computing would take: after that, it is.
            timeout = min(timeout, self.choice.compute_seconds(end - local) or timeout)
        fetch_id = self.fetches.begin(tracked, first, last, timeout)
        if self.choice is not None:
            self.choice.load_begins(fetch_id, end - local)

    def _fetched(self, tracked: Tracked, local: int) -> int | None:
        """Return the chunk after those that are in host memory; None: not known yet."""
        fetch = tracked.fetch
        assert fetch is not None
        slow = fetch.workers > 0
        if slow and time.monotonic() < fetch.until:
            return None
        if not slow and fetch.good < fetch.chunks:
            # Once they are computed, the others may be saved.
            tracked.limit = min(tracked.limit, fetch.end)
            tracked.saved, tracked.save_at = min(tracked.saved, fetch.end), 0
        if not slow and fetch.good and local >= fetch.first * self._settings.chunk_tokens:
            return fetch.end
        # It is computed: a prefetch is not waited for twice.
        tracked.reason = "slow" if slow else "absent"
        tracked.limit = min(tracked.limit, fetch.first)
        self.fetches.drop(tracked)
        return 0

    def _wanted(self, tracked: Tracked) -> int:
        """How many chunks it is worth asking for."""
        request = tracked.request
        if tracked.barred or request.skip_reading_prefix_cache:
            return 0
        return min(self._keys.count(request) + bool(self._tail(tracked)), tracked.limit)

    def _tail(self, tracked: Tracked) -> int:
        """How many blocks another engine has saved of the chunk that comes after the whole ones of a request."""
        if tracked.handed is None:
            return 0
        return max(0, tracked.handed.blocks - self._keys.count(tracked.request) * self._blocks)

    def _lent(self, tracked: Tracked) -> Lent | None:
        """What another engine lends of a request, until that was tried once."""
        return None if tracked.handed is None or tracked.borrowed or tracked.barred else tracked.handed.lent

    def _hashes(self, tracked: Tracked, first: int, last: int) -> bytes:
        """Return the keys of chunks, of which the last may be a tail."""
        whole = self._keys.count(tracked.request)
        hashes = b"".join(self._keys.some(tracked.request, first, min(last, whole)))
        if last <= whole:
            return hashes
        assert tracked.handed is not None, "a tail that nobody has saved"
        return hashes + self._keys.of_blocks(tracked.request, tracked.handed.blocks)

    def _tokens(self, tracked: Tracked, chunks: int) -> int:
        """Return how many tokens are in the first chunks, of which the last may be a tail."""
        whole = self._keys.count(tracked.request)
        if chunks <= whole:
            return chunks * self._settings.chunk_tokens
        return (whole * self._blocks + self._tail(tracked)) * self._block_tokens

    def _found(self, tracked: Tracked, local: int) -> int | None:
        """How many chunks the pool has, as far as it has to be known; None: not known yet."""
        wanted = self._wanted(tracked)
        if wanted * self._settings.chunk_tokens <= local:
            tracked.reason = "failed" if wanted == tracked.limit else "local" if wanted else "short"
            return 0
        if self._lent(tracked) is not None:
            return wanted
        now = time.monotonic()
        lookup = tracked.lookup
        if lookup is None or self._is_stale(tracked, wanted, now):
            self.ask(tracked)
            lookup = tracked.lookup
            assert lookup is not None
        if lookup.answer is None:
            tracked.waiting = tracked.waiting or now
            if now - tracked.waiting < self._settings.lookup_timeout:
                return None
            tracked.reason = "late"
            return 0
        self.heed(tracked)
        tracked.waiting, tracked.reason = 0.0, lookup.problem or "absent"
        found = min(lookup.answer, wanted)
        return None if not lookup.problem and self._is_coming(tracked, found, wanted, now) else found

    def _is_coming(self, tracked: Tracked, found: int, wanted: int, now: float) -> bool:
        """Whether another engine is saving more of a request, as far as is known. If so, the pool is asked again."""
        handed = tracked.handed
        if handed is None or found >= min(wanted, -(-handed.blocks // self._blocks)):
            return False
        if now >= handed.until:
            self._counts["handovers_late"] += not tracked.late
            tracked.late = True
            return False
        if now >= tracked.asked_again:
            pause = min(max((now - handed.since) * _AGAIN_SHARE, _AGAIN_MIN), _AGAIN_MAX)
            tracked.asked_again = now + pause
            self.ask(tracked)
        return True

    @staticmethod
    def _is_stale(tracked: Tracked, wanted: int, now: float) -> bool:
        lookup = tracked.lookup
        if lookup is None or lookup.answer is None:
            return False
        return now > lookup.until or (not lookup.problem and lookup.answer == lookup.chunks < wanted)
