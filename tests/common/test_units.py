# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool import ConfigError
from moonpool.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("4KiB", 4096),
        (" 1 MiB ", 1 << 20),
        ("1.5MiB", 3 << 19),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1MB", "1MiB"),
        ("4k", "4KiB"),
        ("4 kib", "4KiB"),
        ("7parsec", "GiB"),
        ("", "4KiB"),
        ("-4KiB", "4KiB"),
        ("four", "4KiB"),
        ("0.3B", "1"),
        ("1e3", "KiB"),
    ],
)
def test_what_is_no_size_says_what_is(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        ("250ms", 0.25),
        ("20us", 2e-5),
        ("20µs", 2e-5),
        ("1.5s", 1.5),
        (".05", 0.05),
        ("2min", 120),
        ("1h", 3600),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", ".", "5 parsec", "-1s", "nan", "inf", "5S"])
def test_what_is_no_duration_says_what_is(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert "ms" in caught.value.hint


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (17, "17B"), (4096, "4KiB"), (1536, "1.5KiB"), (16 << 20, "16MiB"), (1 << 50, "1024TiB")],
)
def test_sizes_are_shown_in_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (5, "5s"), (0.25, "250ms"), (2e-5, "20us"), (1e-9, "1ns"), (1.5, "1.5s"), (120, "120s")],
)
def test_durations_are_shown_in_the_largest_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 1023), st.sampled_from([0, 10, 20, 30, 40]))
def test_whole_units_survive_the_round_trip(number: int, shift: int) -> None:
    assert parse_bytes(format_bytes(number << shift)) == number << shift
