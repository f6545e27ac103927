# SPDX-License-Identifier: Apache-2.0
"""When `make soak` calls something growth."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos.rounds import Round
from chaos.soak import GROWTH_MAX, grown

STEADY = {"descriptors": 40, "sockets": 25, "threads": 6, "mappings": 200, "rss_bytes": 100 << 20}


def rounds(key: str, values: list[int]) -> list[Round]:
    return [Round(Counter(), Counter(), [{**STEADY, key: value}], []) for value in values]


@pytest.mark.parametrize("key", GROWTH_MAX)
def test_what_keeps_growing_is_named(key: str) -> None:
    step = GROWTH_MAX[key] // 3 + 1
    assert [what.split()[0] for what in grown(rounds(key, [step * number for number in range(30)]))] == [key]


@pytest.mark.parametrize("key", GROWTH_MAX)
def test_what_grows_in_the_beginning_only_or_varies_is_not(key: str) -> None:
    step = GROWTH_MAX[key] + 1
    assert grown(rounds(key, [step * min(number, 5) for number in range(18)])) == []
    assert grown(rounds(key, [100 * step, *[step] * 11])) == []


def test_a_few_rounds_say_nothing() -> None:
    assert grown(rounds("sockets", [1, 2, 3, 4])) == []
