# SPDX-License-Identifier: Apache-2.0
"""Values of the command line, and the options that commands share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from moonpool.address import parse_address
from moonpool.bench.errors import UsageError
from moonpool.bench.plot import require_matplotlib
from moonpool.bench.work import MEMORIES, is_memory
from moonpool.errors import MoonpoolError
from moonpool.units import parse_bytes, parse_duration

__all__ = [
    "ADDRESS",
    "BATCH_MAX",
    "DEPTH_MAX",
    "DURATION",
    "SECRET",
    "SIZE",
    "THREADS_MAX",
    "Choices",
    "ListOf",
    "Value",
    "auto",
    "count",
    "json_option",
    "memory_name",
    "plot_option",
    "plot_option_of",
]

THREADS_MAX = 64
BATCH_MAX = 1 << 20
DEPTH_MAX = 1024

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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
    """One or several names out of a few.

    Args:
        name: what one is called.
        choices: the names.
        also: other spellings, and the names they stand for.
    """

    def __init__(self, name: str, choices: Sequence[str], also: Mapping[str, str] | None = None) -> None:
        def parse(text: str) -> str:
            text = (also or {}).get(text, text)
            if text in choices:
                return text
            nearest = difflib.get_close_matches(text, choices, n=1)
            hint = f"Try: {nearest[0]}" if nearest else f"One of {', '.join(choices)}"
            raise ValueError(f"{text!r} is not there. {hint}")

        super().__init__(name, parse)


def memory_name(text: str) -> str:
    """Parse whose memory it is."""
    if is_memory(text):
        return text
    raise ValueError(
        f"{text!r} is not there. One of {', '.join(MEMORIES)}, cuda:N, cuda:N/registered, registered/cuda:N"
    )


def count(most: int, *, least: int = 1, auto: bool = False) -> Callable[[str], int | None]:
    """Return a parser of numbers from `least` to `most`; with `auto`, the word auto is None."""

    def parse(text: str) -> int | None:
        if auto and text == "auto":
            return None
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a number from {least} to {most}{' or auto' if auto else ''}")
        return int(text)

    return parse


def auto(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return a parser that also takes the word auto, which is None."""
    return lambda text: None if text == "auto" else parse(text)


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


def _result_file(ctx: click.Context, param: click.Parameter, file: str | None) -> str | None:
    """Find out before anything is measured that a result could not be written."""
    if file is not None and file != "-":
        try:
            Path(file).open("a", encoding="utf-8").close()
        except OSError as error:
            raise click.BadParameter(str(error), ctx, param) from error
    return file


def _plot_file(ctx: click.Context, param: click.Parameter, file: str | None) -> Path | None:
    if file is None:
        return None
    try:
        require_matplotlib(Path(file))
    except UsageError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    _result_file(ctx, param, file)
    return Path(file)


json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE|-",
    callback=_result_file,
    help="Write the result as JSON; - is standard output.",
)


def plot_option_of(what: str) -> Callable[[F], F]:
    """Return the option ``--plot`` of a command that draws `what`."""
    return click.option("--plot", "plot_file", metavar="FILE.png", callback=_plot_file, help=f"Draw {what}.")


plot_option = plot_option_of("the rate over the block size")
