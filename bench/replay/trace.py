# SPDX-License-Identifier: Apache-2.0
"""Reading a trace of requests: one JSON object for each line, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moonpool.bench.errors import TraceError

__all__ = ["BLOCK_TOKENS", "Trace", "read_trace"]

#: Tokens of a block, as the traces that Mooncake published have them.
BLOCK_TOKENS: Final = 512

_GZIP_MAGIC: Final = b"\x1f\x8b"
_SHOWN_MAX: Final = 60
#: More than three thousand years: whoever counts microseconds since 1970 is still below it.
_TIME_MAX_MS: Final = 10**16


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came. Blocks are numbered from 0 in the order of their first use.

    Attributes:
        requests: the blocks of each request, from the beginning of its prompt to the end.
        names: what the trace calls each block.
        times_ms: when each request came; empty where that is not known.
        tokens: of the prompt and of the answer of each request; empty where that is not known.
    """

    requests: list[list[int]]
    names: list[int]
    times_ms: list[float] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)

    @property
    def references(self) -> int:
        """Blocks of all requests together."""
        return sum(map(len, self.requests))

    def first(self, count: int | None) -> Trace:
        """Return the trace of the first so many requests; None: all."""
        if count is None or count >= len(self.requests):
            return self
        requests = self.requests[:count]
        blocks = 1 + max((max(request) for request in requests if request), default=-1)
        return Trace(requests, self.names[:blocks], self.times_ms[:count], self.tokens[:count])


def read_trace(file: Path) -> Trace:
    """Read the keys ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids`` of every line.

    Other keys and empty lines are passed over. The order of the lines is the order of the requests.

    Raises:
        TraceError: the file cannot be read, is damaged, or has a line that is no request; it names the line.
    """
    numbers: dict[int, int] = {}
    requests: list[list[int]] = []
    times_ms: list[float] = []
    tokens: list[tuple[int, int]] = []
    for where, line in _lines(file):
        if line.isspace():
            continue
        time_ms, lengths, ids = _request(where, line)
        times_ms.append(time_ms)
        tokens.append(lengths)
        requests.append([numbers.setdefault(name, len(numbers)) for name in ids])
    if not numbers:
        what = "only requests without blocks" if requests else "no requests"
        raise TraceError(f"{file}: there are {what} in it", hint="a file with one JSON object for each line")
    return Trace(requests, list(numbers), times_ms, tokens)


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines, each with the name of its place."""
    number = 0
    try:
        with file.open("rb") as plain:
            packed = plain.peek(2)[:2] == _GZIP_MAGIC
            stream: Iterable[bytes] = gzip.GzipFile(fileobj=plain) if packed else plain
            for number, line in enumerate(stream, 1):
                yield f"{file}: line {number}", line
    except EOFError as error:
        raise TraceError(
            f"{file}: the compressed file was cut off, somewhere behind line {number}", hint="fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            f"{file}: the compressed file is damaged, somewhere behind line {number}",
            cause=str(error),
            hint="fetch it again",
        ) from error
    except OSError as error:
        raise TraceError(f"{file}: cannot be read", cause=error.strerror or str(error)) from error


def _request(where: str, line: bytes) -> tuple[float, tuple[int, int], list[int]]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError is also text that is not UTF-8
        raise TraceError(f"{where}: not JSON", cause=str(error)) from error
    if not isinstance(request, dict):
        raise TraceError(f"{where}: not a JSON object but {_shown(request)}")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in request:
            raise TraceError(f"{where}: the key {key!r} is missing")
    if not _is_time(request["timestamp"]):
        raise TraceError(
            f"{where}: 'timestamp' is {_shown(request['timestamp'])}, not a number of milliseconds from 0 "
            f"to {_TIME_MAX_MS:,}"
        )
    for key in ("input_length", "output_length"):
        if not _is_natural(request[key]):
            raise TraceError(f"{where}: {key!r} is {_shown(request[key])}, not a whole number of tokens from 0")
    ids = request["hash_ids"]
    if not isinstance(ids, list):
        raise TraceError(f"{where}: 'hash_ids' is {_shown(ids)}, not a list")
    for index, name in enumerate(ids):
        if not _is_natural(name):
            raise TraceError(f"{where}: 'hash_ids'[{index}] is {_shown(name)}, not a whole number from 0")
    return float(request["timestamp"]), (request["input_length"], request["output_length"]), ids


def _is_natural(value: Any) -> bool:
    # Exactly int: JSON's true is an int to Python.
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _TIME_MAX_MS


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
