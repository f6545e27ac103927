# SPDX-License-Identifier: Apache-2.0
"""Whether a prefix is quicker to load than to compute, by what both have taken lately."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from typing import Any, Final

from moonpool.connector.settings import ConnectorSettings

__all__ = ["Choice", "Line"]

_log = logging.getLogger(__name__)
#: What a measurement weighs after another one.
_KEEP: Final = 0.9
#: Tokens of prompts that a step has to compute for its time to tell of computing. Steps that only generate do not.
_PROMPT_TOKENS_MIN: Final = 32
#: Good loads in a row after which more of them are begun again.
_GOOD_MIN: Final = 3
#: Steps that are under way at most.
_STEPS_MAX: Final = 64


class Line:
    """Seconds as a line over tokens: what it takes in any case, and for each token. The latest measurements weigh most.

    Attributes:
        fixed: seconds.
        slope: seconds for one token; 0: nothing is known.
    """

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.fixed = 0.0
        self.slope = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take a measurement."""
        new = (1.0, float(tokens), seconds, float(tokens) ** 2, tokens * seconds)
        self._sums = tuple(_KEEP * old + one for old, one in zip(self._sums, new, strict=True))
        n, x, y, xx, xy = self._sums
        spread = xx - x * x / n
        # Of measurements that are all alike, one cannot tell the two apart: all of it is the tokens'.
        self.slope = (xy - x * y / n) / spread if spread > 1e-3 * xx else y / x
        self.fixed = (y - self.slope * x) / n
        if self.slope <= 0 or self.fixed < 0:
            self.slope, self.fixed = xy / xx, 0.0

    @property
    def known(self) -> bool:
        """Whether there was a measurement."""
        return self.slope > 0

    def seconds(self, tokens: float) -> float:
        """Return how long so many tokens take."""
        return self.fixed + self.slope * tokens


class Choice:
    """Chooses between loading and computing. Every method is called on the engine's thread.

    As long as one of the two was never measured, everything is loaded. What is not loaded is not measured, so a load is
    tried all the same now and then. When loads are late or fail, they go one at a time, then none goes, and the same
    way back with those that are tried.

    Args:
        settings: of the connector.
        counts: loads that were only tried are counted here.
    """

    def __init__(self, settings: ConnectorSettings, counts: Counter[str]) -> None:
        self._settings = settings
        self._counts = counts
        self.loading = Line()
        self.computing = Line()
        #: 0: every load that is worth it, 1: one at a time, 2: none.
        self.level = 0
        self._under_way: dict[str | int, int] = {}
        self._good = 0
        self._probed = 0.0
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS_MAX)
        self._ended = 0.0

    # ---------------------------------------------------------------- what is measured

    def step_begins(self, scheduler_output: Any, *, waits: bool) -> None:
        """A step is given to the workers; `waits`: it waits for loads too."""
        tokens = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        prompts = sum(some for name, some in tokens.items() if some > 1 + len(drafts.get(name, ())))
        counts = prompts >= _PROMPT_TOKENS_MIN and not waits
        self._steps.append((time.monotonic(), sum(tokens.values()) if counts else 0))

    def step_ended(self) -> None:
        """The first of the steps under way has ended."""
        if not self._steps:
            return
        began, tokens = self._steps.popleft()
        now = time.monotonic()
        if tokens:
            # Steps that run ahead wait for the one before.
            self.computing.add(tokens, now - max(began, self._ended))
        self._ended = now

    def load_begins(self, name: str | int, tokens: int) -> None:
        """A load or a fetch is given to the workers."""
        self._under_way[name] = tokens

    def load_ended(self, name: str | int, tokens: int, seconds: float, *, trouble: bool) -> None:
        """It has ended, with so many tokens; `trouble`: late, or by an error."""
        self._under_way.pop(name, None)
        if tokens and seconds > 0:
            self.loading.add(tokens, seconds)
        if trouble:
            self._good, self.level = 0, min(2, self.level + 1)
        elif tokens:
            self._good += 1
            # The one that was tried while none goes is enough for going one at a time.
            if self.level == 2 or self._good >= _GOOD_MIN:
                self._good, self.level = 0, max(0, self.level - 1)

    # ---------------------------------------------------------------- what is chosen

    def load_seconds(self, tokens: int) -> float:
        """Return how long a load of so many tokens would take that began now, behind those under way."""
        waits = sum(self._under_way.values()) / self._settings.load_threads
        return self.loading.seconds(tokens + waits)

    def compute_seconds(self, tokens: int) -> float | None:
        """Return how long so many tokens take to compute; None: it is not known."""
        return self.computing.seconds(tokens) if self.computing.known else None

    def loads(self, request_id: str, tokens: int) -> bool:
        """Choose: whether so many tokens are to be loaded."""
        load, compute = self.load_seconds(tokens), self.compute_seconds(tokens)
        quicker = compute is None or not self.loading.known or load < compute
        free = self.level == 0 or (self.level == 1 and not self._under_way)
        now, probe = time.monotonic(), False
        if not (quicker and free) and not self._under_way and now - self._probed >= self._settings.load_probe:
            probe = True
            self._probed = now
            self._counts["load_probes"] += 1
        _log.debug(
            "moonpool: request %s: %d tokens take %.4f s to load (%d of others before them) and %s s to compute, "
            "level %d: %s",
            request_id,
            tokens,
            load,
            sum(self._under_way.values()),
            "?" if compute is None else f"{compute:.4f}",
            self.level,
            "load, to try" if probe else "load" if quicker and free else "compute",
        )
        return probe or (quicker and free)

    @property
    def state(self) -> dict[str, float]:
        """What it goes by, as it is shown."""
        return {
            "load_level": self.level,
            "load_tokens_per_second": 1 / self.loading.slope if self.loading.known else 0.0,
            "load_latency_seconds": self.loading.fixed,
            "compute_tokens_per_second": 1 / self.computing.slope if self.computing.known else 0.0,
        }
