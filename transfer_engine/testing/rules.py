# SPDX-License-Identifier: Apache-2.0
"""What a `FaultProxy` does to the connections that go through it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeGuard

from moonpool.transfer_engine.errors import InvalidArgumentError

__all__ = [
    "Bytes",
    "Corrupt",
    "Cut",
    "Delay",
    "Direction",
    "Kind",
    "Refuse",
    "Reorder",
    "Rule",
    "Seconds",
    "check_count",
    "check_kind",
    "draw",
    "ends",
    "is_number",
    "shown",
]

#: Which connections of a pair: the one that carries control messages, or those that carry data.
Kind: TypeAlias = Literal["control", "lane"]
#: Towards the engine behind the proxy, or back from it.
Direction: TypeAlias = Literal["to_target", "from_target"]
#: A number of seconds, or a range from which the seed chooses.
Seconds: TypeAlias = float | tuple[float, float]
#: A number of bytes, or a range from which the seed chooses.
Bytes: TypeAlias = int | tuple[int, int]

_SECONDS_MAX = 86_400.0
_BYTES_MAX = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which connections a rule concerns. Not used itself: see `Delay`, `Cut`, `Corrupt`, `Refuse` and `Reorder`.

    Attributes:
        only: the kind of connection; None: both, and those that speak another protocol.
        probability: of concerning a connection that it could concern.
        times: how many connections it concerns at most; None: all.
    """

    only: Kind | None = None
    probability: float = 1.0
    times: int | None = None

    def __post_init__(self) -> None:
        check_kind(self.only)
        if not is_number(self.probability) or not 0.0 <= self.probability <= 1.0:
            raise InvalidArgumentError(f"probability is {shown(self.probability)}", hint="a number from 0 to 1")
        if self.times is not None:
            check_count("times", self.times, 1, "at least 1, or None for all")


@dataclass(frozen=True, kw_only=True)
class Delay(Rule):
    """Passes every piece (at most 128 KiB) on so much later, and the next one only after it: a long, thin path.

    Attributes:
        seconds: drawn anew for each piece.
    """

    seconds: Seconds

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_seconds(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Cut(Rule):
    """Ends the connection.

    Attributes:
        after_bytes: that have passed through it, both directions together, since the rule was made.
        reset: with a reset, which loses what is under way, as when a host or a firewall forgets the connection; else
            with an end in good order in both directions, as when a middlebox closes it.
    """

    after_bytes: Bytes
    reset: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_bytes(self.after_bytes)


@dataclass(frozen=True, kw_only=True)
class Corrupt(Rule):
    """Flips one bit.

    Attributes:
        after_bytes: that have passed in this direction since the rule was made; the byte after them is changed.
        direction: which way the byte travels.
    """

    after_bytes: Bytes
    direction: Direction = "to_target"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_bytes(self.after_bytes)
        if self.direction not in ("to_target", "from_target"):
            raise InvalidArgumentError(f"direction is {shown(self.direction)}", hint="'to_target' or 'from_target'")


@dataclass(frozen=True, kw_only=True)
class Refuse(Rule):
    """Resets a connection as soon as its kind is known, which is before anything is passed on."""


@dataclass(frozen=True, kw_only=True)
class Reorder(Rule):
    """Passes connections on in another order than they came. It concerns both kinds: they are not told apart yet.

    Attributes:
        hold: how many connections wait for each other at most.
        seconds: how long they wait.
    """

    hold: int = 8
    seconds: Seconds = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_seconds(self.seconds)
        if self.only is not None:
            raise InvalidArgumentError("only was given to Reorder", hint="Reorder() without it")
        check_count("hold", self.hold, 2, "at least 2 connections")


def check_kind(only: object) -> None:
    """Refuse what names no kind of connection."""
    if not (only is None or (isinstance(only, str) and only in ("control", "lane"))):
        raise InvalidArgumentError(f"only is {shown(only)}", hint="'control', 'lane' or None")


def check_count(name: str, value: object, minimum: int, hint: str) -> None:
    """Refuse what is no int from `minimum` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidArgumentError(f"{name} is {shown(value)}", hint=hint)


def _check_seconds(value: object) -> None:
    if ends(value, _SECONDS_MAX) is None:
        raise InvalidArgumentError(
            f"seconds is {shown(value)}", hint="a number of seconds from 0 to a day, or (lowest, highest)"
        )


def _check_bytes(value: object) -> None:
    found = ends(value, _BYTES_MAX)
    if found is None or not all(isinstance(end, int) for end in found):
        raise InvalidArgumentError(f"after_bytes is {shown(value)}", hint="an int from 0 on, or (lowest, highest)")


def ends(value: object, maximum: float) -> tuple[float, float] | None:
    """Return both ends of a range, or a number twice. None: it is neither, or not between 0 and `maximum`."""
    low, high = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    if not (is_number(low) and is_number(high) and 0 <= low <= high <= maximum):
        return None
    return low, high


def is_number(value: object) -> TypeGuard[float]:
    """Say whether it is an int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Write a value into a message."""
    try:
        return repr(value)
    except ValueError:  # Python does not write out ints of thousands of digits
        return f"a huge {type(value).__name__}"


def draw(chance: random.Random, value: Seconds) -> float:
    """Draw a value from a range."""
    return chance.uniform(*value) if isinstance(value, tuple) else value
