# SPDX-License-Identifier: Apache-2.0
"""What rounds come to: percentiles, and how much better one server is than another, with an interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moonpool.bench.measure import median
from moonpool.bench.serve.rounds import Asked, Round

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PERCENTILES",
    "Gain",
    "Samples",
    "gaps",
    "percentile",
    "rate_gain",
    "samples",
    "spread",
    "time_gain",
    "tpot",
]

#: Of all times.
PERCENTILES: Final = (50, 90, 99)
#: Ends of an interval, in percent of resamples: it has 95 % of them.
_INTERVAL: Final = (2.5, 97.5)
_RESAMPLES: Final = 1000
_RESAMPLES_MIN: Final = 100
#: Values that are looked at in all resamples together.
_LOOKED_AT_MAX: Final = 50_000_000
#: With fewer conversations, or rounds, an interval would pretend.
_CONVERSATIONS_MIN: Final = 5
_ROUNDS_MIN: Final = 6
#: Resamples are the same whenever the same times are looked at.
_SEED: Final = 8


@dataclass(frozen=True)
class Gain:
    """How many times better the first server is than another one: above 1 it is better.

    Attributes:
        value: as measured.
        low: the lower end of its 95 % interval, or None where there is too little to say.
        high: the upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Samples:
    """Times of some requests.

    Attributes:
        values: the times.
        conversations: the number of the conversation of each, over all rounds.
        sizes: conversations of each round.
    """

    values: NDArray[np.float64]
    conversations: NDArray[np.int64]
    sizes: tuple[int, ...]


def samples(
    rounds: Sequence[Round], of: Callable[[Asked], float | None], turns: Callable[[int], bool] = lambda _: True
) -> Samples:
    """Return a time of all requests that have it, of those turns."""
    values: list[float] = []
    conversations: list[int] = []
    before = 0
    for one in rounds:
        for asked in one.asked:
            if turns(asked.turn) and (value := of(asked)) is not None:
                values.append(value)
                conversations.append(before + asked.conversation)
        before += one.conversations
    return Samples(
        np.array(values), np.array(conversations, dtype=np.int64), tuple(one.conversations for one in rounds)
    )


def tpot(asked: Asked) -> float | None:
    """Return the time for each token behind the first one."""
    answer = asked.answer
    if answer.ttft is None or answer.tokens < 2:
        return None
    return sum(answer.gaps) / (answer.tokens - 1)


def gaps(rounds: Iterable[Round]) -> NDArray[np.float64]:
    """Return the times between the parts of all answers."""
    every = [np.frombuffer(asked.answer.gaps) for one in rounds for asked in one.asked if asked.answer.gaps]
    return np.concatenate(every) if every else np.empty(0)


def spread(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return the percentiles and the largest, each a value that was measured."""
    names = [f"p{q}" for q in PERCENTILES]
    if not len(values):
        return dict.fromkeys([*names, "max"])
    found = np.percentile(values, [*PERCENTILES, 100], method="inverted_cdf")
    return dict(zip([*names, "max"], map(float, found), strict=True))


def percentile(ordered: NDArray[np.float64], weights: NDArray[np.int64], q: float) -> float | None:
    """Return a percentile of values of which each is there so many times; None where none is.

    Args:
        ordered: the values, in order.
        weights: how often each is there.
        q: percent, above 0.
    """
    reached = np.cumsum(weights)
    if not len(reached) or reached[-1] == 0:
        return None
    return float(ordered[np.searchsorted(reached, q / 100 * reached[-1])])


def time_gain(first: Samples, other: Samples, q: float) -> Gain | None:
    """Return a percentile of the other's times over that of the first's, for the same rounds of both.

    The interval is of a bootstrap of two stages, because requests of a round, and of a conversation, resemble each
    other: rounds are drawn, and conversations of each (Davison & Hinkley, Bootstrap Methods and their Application,
    1997, section 3.8). The same are drawn of both servers, which were asked the same.
    """
    pair = (_Ordered(first), _Ordered(other))
    ones = np.ones(sum(first.sizes), dtype=np.int64)
    value = _quotient(pair, ones, q)
    if value is None:
        return None
    if len(ones) < _CONVERSATIONS_MIN:
        return Gain(value)
    generator = np.random.default_rng(_SEED)
    looked_at = len(first.values) + len(other.values)
    resamples = max(_RESAMPLES_MIN, min(_RESAMPLES, _LOOKED_AT_MAX // looked_at))
    drawn = (_quotient(pair, _resample(first.sizes, generator), q) for _ in range(resamples))
    return _with_interval(value, [one for one in drawn if one is not None])


def rate_gain(first: Sequence[float], other: Sequence[float]) -> Gain | None:
    """Return the median of the rounds' ratios of the first's rates to the other's; rounds are drawn."""
    ratios = [ours / theirs for ours, theirs in zip(first, other, strict=True) if ours and theirs]
    if not ratios:
        return None
    if len(ratios) < _ROUNDS_MIN:
        return Gain(median(ratios))
    drawn = np.random.default_rng(_SEED).choice(ratios, (_RESAMPLES, len(ratios)))
    return _with_interval(median(ratios), np.median(drawn, axis=1).tolist())


class _Ordered:
    def __init__(self, of: Samples) -> None:
        order = np.argsort(of.values, kind="stable")
        self.values, self.conversations = of.values[order], of.conversations[order]


def _quotient(pair: tuple[_Ordered, _Ordered], times: NDArray[np.int64], q: float) -> float | None:
    """Return the other's percentile over the first's, where each conversation is there so many times."""
    ours, theirs = (percentile(one.values, times[one.conversations], q) for one in pair)
    return theirs / ours if ours and theirs else None


def _resample(sizes: Sequence[int], generator: np.random.Generator) -> NDArray[np.int64]:
    times = np.zeros(sum(sizes), dtype=np.int64)
    begins = np.cumsum([0, *sizes])
    for number in generator.integers(0, len(sizes), len(sizes)):
        size = sizes[number]
        drawn = np.bincount(generator.integers(0, size, size), minlength=size)
        times[begins[number] : begins[number] + size] += drawn
    return times


def _with_interval(value: float, drawn: Sequence[float]) -> Gain:
    if not drawn:
        return Gain(value)
    low, high = np.percentile(drawn, _INTERVAL)
    return Gain(value, float(low), float(high))
