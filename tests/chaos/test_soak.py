# SPDX-License-Identifier: Apache-2.0
"""When `make soak` calls something growth."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console

from chaos.rounds import Round
from chaos.soak import GROWTH_MAX, grown, table

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


def test_the_table_fits_into_80_columns_with_a_line_for_each_round() -> None:
    counts = Counter(begun=1_234_567, completed=1_200_000, unsettled=120, bytes=123 << 30)
    happened = Round(counts, Counter(cut=99_999), [{**STEADY, "rss_bytes": 2500 << 20}], [])
    out = io.StringIO()
    Console(file=out, width=80).print(table([happened] * 3))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[1].split() == [
        "0", "1234567", "1200000", "120", "123.00", "99999", "40", "25", "6", "200", "2500",
    ]  # fmt: skip
