# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations as people write them, and back.

Sizes are powers of two with their IEC names (``4KiB`` = 4096 bytes). Decimal-looking names such as ``MB`` or a bare
``M`` are refused: in this field they are read both ways, and a silent guess would be wrong for somebody.
Durations are float seconds.
"""

from __future__ import annotations

import math
import re

from moonpool.errors import ConfigError

__all__ = ["format_bytes", "format_duration", "parse_bytes", "parse_duration"]

_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ]*)\s*")


# Python does not read ints of thousands of digits; 2**64 has 20.
_DIGITS_MAX = 30


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` names: ``"4096"``, ``"4KiB"``, ``"1.5MiB"``.

    Raises:
        ConfigError: not a number, an unknown unit, or not a whole number of bytes.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size", hint="a number of bytes, or one with KiB, MiB, GiB or TiB: 4KiB")
    number, unit = match.groups()
    factor = _BYTES.get(unit or "B")
    if factor is None:
        raise ConfigError(f"{text!r} has an unknown unit of size {unit!r}", hint=_size_hint(number, unit))
    if len(number) > _DIGITS_MAX:
        raise ConfigError(f"a size of {len(number)} digits is none", hint="a number of bytes, such as 4KiB")
    value = float(number) * factor if "." in number else int(number) * factor
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number of bytes", hint=f"{math.ceil(value)}")
    return int(value)


def _size_hint(number: str, unit: str) -> str:
    for name, factor in _BYTES.items():
        if name[0].lower() == unit[0].lower() and factor > 1:
            return f"{number}{name} for {number} x {factor} bytes"
    return "B, KiB, MiB, GiB or TiB"


def parse_duration(text: str) -> float:
    """Return the seconds that `text` names: ``"5s"``, ``"250ms"``, ``"20us"``, ``"1.5"`` (seconds).

    Raises:
        ConfigError: not a number, or an unknown unit.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a duration", hint="a number of seconds, or one with a unit: 250ms, 5s, 2min"
        )
    number, unit = match.groups()
    factor = _SECONDS.get(unit or "s")
    if factor is None:
        raise ConfigError(f"{text!r} has an unknown unit of time {unit!r}", hint="ns, us, ms, s, min or h")
    return float(number) * factor


def format_bytes(count: int) -> str:
    """Return `count` in the largest unit that is at most `count`: ``4096`` is ``"4KiB"``, ``1536`` is ``"1.5KiB"``.

    At most three decimals are shown, so the text of an odd count is rounded.
    """
    unit, factor = "B", 1
    for name, size in _BYTES.items():
        if abs(count) >= size:
            unit, factor = name, size
    return f"{_trim(count / factor)}{unit}"


def format_duration(seconds: float) -> str:
    """Return `seconds` in the largest of ns, us, ms and s that is at most `seconds`: ``0.25`` is ``"250ms"``."""
    unit, factor = "ns", 1e-9
    for name in ("us", "ms", "s"):
        # A nanosecond of slack: 0.001 seconds is not quite 1e-3 after some arithmetic.
        if abs(seconds) + 1e-12 >= _SECONDS[name]:
            unit, factor = name, _SECONDS[name]
    return "0s" if seconds == 0 else f"{_trim(seconds / factor)}{unit}"


def _trim(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
