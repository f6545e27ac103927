# SPDX-License-Identifier: Apache-2.0
"""Values of the command line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from moonpool.address import parse_address
from moonpool.errors import MoonpoolError
from moonpool.units import parse_bytes, parse_duration

__all__ = ["ADDRESS", "DURATION", "SECRET", "SIZE", "Choices", "ListOf", "Value", "count"]

T = TypeVar("T")


class Value(click.ParamType, Generic[T]):  # type: ignore[type-arg]  # not generic before click 8.3
    """A value that one of the project's own parsers reads."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Parse a text; pass anything else through (it is a default)."""
        if not isinstance(value, str):
            converted: T = value
            return converted
        try:
            return self._parse(value)
        except (MoonpoolError, ValueError) as error:
            self.fail(str(error), param, ctx)


class ListOf(Value[list[T]]):
    """One or several values, separated by commas. Each becomes a row, or part of the rows, of the sweep."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        super().__init__(f"{name}[,{name}...]", lambda text: [parse(part.strip()) for part in text.split(",")])


class Choices(ListOf[str]):
    """One or several names out of a few."""

    def __init__(self, name: str, choices: Sequence[str]) -> None:
        def parse(text: str) -> str:
            if text in choices:
                return text
            nearest = difflib.get_close_matches(text, choices, n=1)
            hint = f"Try: {nearest[0]}" if nearest else f"One of {', '.join(choices)}"
            raise ValueError(f"{text!r} is not there. {hint}")

        super().__init__(name, parse)


def count(most: int, *, auto: bool = False) -> Callable[[str], int | None]:
    """Return a parser of numbers from 1 to `most`; with `auto`, the word auto is None."""

    def parse(text: str) -> int | None:
        if auto and text == "auto":
            return None
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise ValueError(f"{text!r} is not a number from 1 to {most}{' or auto' if auto else ''}")
        return int(text)

    return parse


def _size(text: str) -> int:
    size = parse_bytes(text)
    if size == 0:
        raise ValueError("a size of 0 bytes moves nothing")
    return size


def _secret(text: str) -> bytes:
    if text.startswith("@"):
        try:
            secret = Path(text[1:]).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"cannot read the secret: {error}") from error
    else:
        secret = os.fsencode(text)
    if not secret:
        raise ValueError("the secret is empty")
    return secret


SIZE = _size
DURATION = Value("duration", parse_duration)
ADDRESS = Value("host:port", parse_address)
SECRET = Value("secret", _secret)
