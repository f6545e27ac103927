# SPDX-License-Identifier: Apache-2.0
"""All figures of one server, and how the first one compares with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from moonpool.bench.measure import median
from moonpool.bench.serve.contest import Variant
from moonpool.bench.serve.figures import Gain, Samples, gaps, rate_gain, samples, spread, time_gain, tpot
from moonpool.bench.serve.rounds import Asked, Round
from moonpool.bench.serve.scraping import Tiers, tiers

__all__ = ["Summary", "TurnSummary", "summaries"]

_Times = dict[str, "float | None"]


@dataclass(frozen=True)
class TurnSummary:
    """The requests that have the same place in their conversations.

    Attributes:
        requests: that were answered.
        ttft: seconds to the first token, as `spread` has them.
        prompt_tokens: of a prompt, on average, as the server counts; None: it does not.
        cached_tokens: of those, what was not computed.
        gain: how many times sooner the first server's p50 comes; None for that one itself.
    """

    requests: int
    ttft: _Times
    prompt_tokens: float | None
    cached_tokens: float | None
    gain: Gain | None


@dataclass(frozen=True)
class Summary:
    """The figures of one server. Times in seconds, as `spread` has them, over the answers of all rounds.

    Attributes:
        name: of the server.
        requests: that were answered.
        failed: that were not.
        dropped: that were not sent, or not waited for.
        requests_per_s: answered in a second: the median over the rounds.
        output_tokens_per_s: in answers: the median over the rounds.
        ttft: from sending a request to its first token.
        later_ttft: the same, without the first turns of conversations.
        itl: between parts of an answer.
        tpot: for each token of an answer behind the first one.
        e2e: from sending a request to the end of its answer.
        late: how much later requests were sent than they were due.
        prompt_tokens: of all prompts, as the server counts; None: it does not.
        cached_tokens: of those, as it tells with each answer; None: it does not.
        queried_tokens: of all prompts, as its metrics count.
        hit_tokens: of those, by tier.
        hit_ratios: the same as parts.
        counters: by how much its counters have grown.
        turns: requests by their place in conversations.
        gains: how many times better the first server is, by figure.
    """

    name: str
    requests: int
    failed: int
    dropped: int
    requests_per_s: float | None
    output_tokens_per_s: float | None
    ttft: _Times
    later_ttft: _Times
    itl: _Times
    tpot: _Times
    e2e: _Times
    late: _Times
    prompt_tokens: int | None
    cached_tokens: int | None
    queried_tokens: float | None
    hit_tokens: dict[str, float]
    hit_ratios: dict[str, float]
    counters: dict[str, float]
    turns: list[TurnSummary]
    gains: dict[str, Gain] = field(default_factory=dict)


def summaries(variants: Sequence[Variant]) -> list[Summary]:
    """Return the figures of each server, in order; all are compared with the first."""
    return [_summary(variant, None if number == 0 else variants[0]) for number, variant in enumerate(variants)]


def _summary(variant: Variant, first: Variant | None) -> Summary:
    rounds = [variant.rounds[number] for number in sorted(variant.rounds)]
    every = [asked for one in rounds for asked in one.asked]
    counts = [part for one in rounds if one.grown is not None and (part := tiers(one.grown)) is not None]
    found: Tiers | None = sum(counts[1:], counts[0]) if counts else None
    return Summary(
        name=variant.name,
        requests=len(every),
        failed=sum(one.failures.total() for one in rounds),
        dropped=sum(one.dropped for one in rounds),
        requests_per_s=median([len(one.asked) / one.seconds for one in rounds]) if rounds else None,
        output_tokens_per_s=median(_rates(rounds)) if rounds else None,
        ttft=spread(samples(rounds, _ttft).values),
        later_ttft=spread(samples(rounds, _ttft, _later).values),
        itl=spread(gaps(rounds)),
        tpot=spread(samples(rounds, tpot).values),
        e2e=spread(samples(rounds, _e2e).values),
        late=spread(samples(rounds, _late).values),
        prompt_tokens=_told([one.answer.prompt_tokens for one in every]),
        cached_tokens=_told([one.answer.cached_tokens for one in every]),
        queried_tokens=None if found is None else found.queried,
        hit_tokens={} if found is None else found.hits,
        hit_ratios={}
        if found is None
        else {tier: ratio for tier in found.hits if (ratio := found.ratio(tier)) is not None},
        counters=_sums([one.grown for one in rounds if one.grown is not None]),
        turns=_turns(rounds, every, [] if first is None else _shared(first, variant)),
        gains={} if first is None else _gains(_shared(first, variant), _shared(variant, first)),
    )


def _turns(rounds: Sequence[Round], every: Sequence[Asked], ours: Sequence[Round]) -> list[TurnSummary]:
    numbers = {one.number for one in ours}
    theirs = [one for one in rounds if one.number in numbers]
    turns = []
    for turn in range(1 + max((asked.turn for asked in every), default=-1)):
        answers = [asked.answer for asked in every if asked.turn == turn]
        turns.append(
            TurnSummary(
                len(answers),
                spread(_of_turn(rounds, turn).values),
                _mean([one.prompt_tokens for one in answers]),
                _mean([one.cached_tokens for one in answers]),
                time_gain(_of_turn(ours, turn), _of_turn(theirs, turn), 50),
            )
        )
    return turns


def _of_turn(rounds: Sequence[Round], turn: int) -> Samples:
    return samples(rounds, _ttft, lambda number: number == turn)


def _ttft(asked: Asked) -> float | None:
    return asked.answer.ttft


def _e2e(asked: Asked) -> float:
    return asked.answer.seconds


def _late(asked: Asked) -> float:
    return asked.late_s


def _every(turn: int) -> bool:
    return turn >= 0


def _later(turn: int) -> bool:
    return turn > 0


#: Times by which servers are compared: of which turns, and which percentile.
_TIME_GAINS: Final[dict[str, tuple[Callable[[Asked], float | None], Callable[[int], bool], float]]] = {
    "ttft_p50": (_ttft, _every, 50),
    "ttft_p99": (_ttft, _every, 99),
    "later_ttft_p50": (_ttft, _later, 50),
    "tpot_p50": (tpot, _every, 50),
    "e2e_p50": (_e2e, _every, 50),
}


def _shared(first: Variant, other: Variant) -> list[Round]:
    """Return the rounds of the first that the other has as well."""
    return [first.rounds[number] for number in sorted(first.rounds.keys() & other.rounds.keys())]


def _gains(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, Gain]:
    gains = {
        name: time_gain(samples(ours, of, turns), samples(theirs, of, turns), q)
        for name, (of, turns, q) in _TIME_GAINS.items()
    }
    gains["output_tokens_per_s"] = rate_gain(_rates(ours), _rates(theirs))
    return {name: gain for name, gain in gains.items() if gain is not None}


def _rates(rounds: Sequence[Round]) -> list[float]:
    return [one.output_tokens / one.seconds for one in rounds]


def _sums(counters: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in counters for name in one)
    return {name: sum(one.get(name, 0.0) for one in counters) for name in names}


def _told(values: Sequence[int | None]) -> int | None:
    """Return the sum, where all are known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(values: Sequence[int | None]) -> float | None:
    total = _told(values)
    return None if total is None else total / len(values)
