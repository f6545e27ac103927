# SPDX-License-Identifier: Apache-2.0
"""Percentiles, intervals, and what a page of metrics counts."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.serve.asking import Answer
from moonpool.bench.serve.figures import Gain, gaps, percentile, rate_gain, samples, spread, time_gain, tpot
from moonpool.bench.serve.rounds import Asked, Round
from moonpool.bench.serve.scraping import Tiers, counted, difference, tiers

TIMES = st.floats(1e-6, 1e3, allow_nan=False)


def answered(conversation: int, ttft: float, turn: int = 0, tokens: int = 1, waits: tuple[float, ...] = ()) -> Asked:
    return Asked(conversation, turn, 0.0, Answer(ttft=ttft, gaps=array("d", waits), seconds=1.0, tokens=tokens))


def round_of(number: int, times: list[float]) -> Round:
    asked = [answered(index, value) for index, value in enumerate(times)]
    return Round(number, len(times), len(times), 1.0, asked)


def ttft(asked: Asked) -> float | None:
    return asked.answer.ttft


@given(st.lists(TIMES, min_size=1, max_size=200))
def test_percentiles_are_values_that_were_measured(values: list[float]) -> None:
    found = spread(np.array(values))
    assert set(found.values()) <= set(values)
    assert found["p50"] <= found["p90"] <= found["p99"] <= found["max"] == max(values)  # type: ignore[operator]
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        # At least so many are not above it, and one less would be too few.
        assert sum(value <= found[name] for value in values) >= part * len(values) - 1e-9  # type: ignore[operator]
        assert sum(value < found[name] for value in values) < part * len(values) + 1e-9  # type: ignore[operator]


@given(
    st.lists(st.tuples(TIMES, st.integers(0, 5)), min_size=1, max_size=60),
    st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]),
)
def test_a_value_that_is_there_many_times_counts_many_times(pairs: list[tuple[float, int]], q: float) -> None:
    pairs.sort()
    values, weights = np.array([value for value, _ in pairs]), np.array([weight for _, weight in pairs])
    repeated = np.repeat(values, weights)
    expected = float(np.percentile(repeated, q, method="inverted_cdf")) if len(repeated) else None
    assert percentile(values, weights, q) == expected


def test_nothing_has_no_percentiles() -> None:
    assert spread(np.empty(0)) == {"p50": None, "p90": None, "p99": None, "max": None}
    assert percentile(np.empty(0), np.empty(0, dtype=np.int64), 50) is None
    assert time_gain(samples([], ttft), samples([], ttft), 50) is None


def test_twice_as_slow_is_a_gain_of_two_with_an_interval_around_it() -> None:
    generator = np.random.default_rng(5)
    times = [generator.lognormal(0.0, 0.3, 80).tolist() for _ in range(3)]
    first = samples([round_of(number, one) for number, one in enumerate(times)], ttft)
    other = samples([round_of(number, [2 * value for value in one]) for number, one in enumerate(times)], ttft)
    gain = time_gain(first, other, 50)
    # The same conversations are drawn of both, so a ratio that is the same for all has no spread.
    assert gain == Gain(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))


def test_noise_makes_an_interval_that_has_the_truth_in_it() -> None:
    generator = np.random.default_rng(6)
    covered = 0
    for _ in range(20):
        sides = [
            samples(
                [round_of(number, (scale * generator.lognormal(0.0, 0.5, 60)).tolist()) for number in range(3)], ttft
            )
            for scale in (1.0, 1.5)
        ]
        gain = time_gain(sides[0], sides[1], 50)
        assert gain is not None
        assert gain.low is not None
        assert gain.high is not None
        assert gain.low <= gain.value <= gain.high
        covered += gain.low <= 1.5 <= gain.high
    # The seed is fixed: of 20 intervals of 95 %, few may miss.
    assert covered >= 17


def test_few_conversations_have_no_interval() -> None:
    first, other = (samples([round_of(1, [value] * 4)], ttft) for value in (1.0, 3.0))
    assert time_gain(first, other, 50) == Gain(3.0)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=12))
def test_rates_are_compared_round_by_round(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = [one for one, _ in pairs], [one for _, one in pairs]
    gain = rate_gain(ours, theirs)
    assert gain is not None
    ratios = sorted(one / other for one, other in pairs)
    assert gain.value == pytest.approx(float(np.median(ratios)))
    assert (gain.low is None) == (len(pairs) < 6)
    if gain.low is not None and gain.high is not None:
        assert ratios[0] * (1 - 1e-9) <= gain.low <= gain.high <= ratios[-1] * (1 + 1e-9)


def test_a_round_without_tokens_is_not_compared() -> None:
    assert rate_gain([0.0], [1.0]) is None
    assert rate_gain([2.0, 0.0], [1.0, 1.0]) == Gain(2.0)


def test_times_between_tokens() -> None:
    one = Round(1, 2, 2, 1.0, [answered(0, 0.5, tokens=4, waits=(0.1, 0.2, 0.3)), answered(1, 0.5)])
    assert gaps([one]).tolist() == [0.1, 0.2, 0.3]
    assert samples([one], tpot).values.tolist() == [pytest.approx(0.2)]
    assert gaps([Round(1)]).tolist() == []


PAGE = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1e2
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 30.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 50.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
moonpool_connector_load_bytes_total{engine="0",mode="a\\"b"} 7
vllm:moonpool_load_seconds_sum 0.5
moonpool_pool_gauge 9
vllm:prompt_tokens_total NaN
what is this
"""
BY_SOURCE = 'vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source='


def test_counters_are_summed_over_engines_and_gauges_are_left_out() -> None:
    assert counted(PAGE) == {
        "vllm:prefix_cache_queries": 200.0,
        "vllm:prefix_cache_hits": 30.0,
        "vllm:external_prefix_cache_hits": 50.0,
        'moonpool_connector_load_bytes{mode="a\\"b"}': 7.0,
        "vllm:moonpool_load_seconds_sum": 0.5,
    }


@given(st.text(max_size=200))
def test_any_page_is_read(page: str) -> None:
    assert all(isinstance(value, float) for value in counted(page).values())


def test_tiers_are_those_that_the_server_tells_apart() -> None:
    assert tiers(counted(PAGE)) == Tiers(200.0, {"device": 30.0, "external": 50.0})
    named = counted(f'{PAGE}{BY_SOURCE}"device"}} 30\n{BY_SOURCE}"host"}} 45\n{BY_SOURCE}"external_unspecified"}} 5\n')
    found = tiers(named)
    assert found == Tiers(200.0, {"device": 30.0, "host": 45.0, "external": 5.0})
    assert found is not None
    assert (found.ratio("host"), found.ratio("disk")) == (0.225, 0.0)
    assert found + Tiers(100.0, {"device": 1.0, "disk": 2.0}) == Tiers(
        300.0, {"device": 31.0, "host": 45.0, "external": 5.0, "disk": 2.0}
    )
    assert tiers({}) is None
    assert Tiers(0.0, {}).ratio("device") is None


def test_counters_that_shrink_or_vanish_are_of_another_server() -> None:
    assert difference({"a": 1.0}, {"a": 3.0, "b": 2.0}) == {"a": 2.0, "b": 2.0}
    assert difference({"a": 1.0}, {"a": 0.5}) is None
    assert difference({"a": 1.0}, {}) is None
