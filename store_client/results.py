# SPDX-License-Identifier: Apache-2.0
"""What became of each chunk of a batch."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

from moonpool.errors import MoonpoolError
from moonpool.store_client.errors import ChunkNotFoundError

__all__ = ["GetResults", "Outcome", "Results"]


class Outcome(enum.IntEnum):
    """The outcome of one chunk of a batch."""

    #: It is done.
    OK = 0
    #: Put: the chunk was there before, nothing was written.
    ALREADY = 1
    #: There is no such chunk, or it is not sure that the bytes are its bytes: the lease ended before they had come.
    MISS = 2
    #: It could not be done; `Results.errors` says why.
    FAILED = 3
    #: Get: every copy that could be read had a wrong header or digest. As good as a miss, and worth an alarm.
    CORRUPT = 4


_GOOD: Final = frozenset({Outcome.OK, Outcome.ALREADY})


class Results:
    """The outcomes of a batch, in its order. Immutable.

    Attributes:
        outcomes: one `Outcome` number per chunk (``bytes``, so a chunk costs one byte).
        errors: for chunks that are FAILED or CORRUPT, why.
        replicas: for a put, how many copies of each chunk it has written; 0 where the chunk is not OK. Else empty.
    """

    __slots__ = ("errors", "outcomes", "replicas")

    def __init__(self, outcomes: bytes, errors: dict[int, MoonpoolError], replicas: bytes = b"") -> None:
        self.outcomes = outcomes
        self.errors = errors
        self.replicas = replicas

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether every chunk is OK or ALREADY."""
        return self.count(Outcome.OK) + self.count(Outcome.ALREADY) == len(self.outcomes)

    def count(self, outcome: Outcome) -> int:
        """Return how many chunks have this outcome."""
        return self.outcomes.count(outcome)

    def where(self, *outcomes: Outcome) -> list[int]:
        """Return the indexes of the chunks that have one of these outcomes."""
        return [index for index, outcome in enumerate(self.outcomes) if outcome in outcomes]

    def raise_for_errors(self) -> None:
        """Raise the error of the first chunk that is FAILED or CORRUPT, if there is one. A miss is none."""
        if self.errors:
            raise self.errors[min(self.errors)]

    def require(self) -> None:
        """Raise unless every chunk is OK or ALREADY.

        Raises:
            ChunkNotFoundError: the first that is not is a miss.
            MoonpoolError: it failed.
        """
        if self.ok:
            return
        for index, outcome in enumerate(self.outcomes):
            if outcome not in _GOOD:
                missing = ChunkNotFoundError("there is no such chunk", item=index, hint="compute it, and put it")
                raise self.errors.get(index, missing)

    def __repr__(self) -> str:
        counted = [f"{self.count(outcome)} {outcome.name}" for outcome in Outcome if self.count(outcome)]
        return f"<{type(self).__name__} {', '.join(counted) or 'empty'}>"


class GetResults(Results):
    """What a get has brought. ``results[i]`` is the bytes of chunk i, or None when there are none.

    Attributes:
        lengths: bytes of each chunk, 0 for those that are not OK.
        values: for `get` the bytes or None of each; None for `get_into`, where they are in the destinations.
    """

    __slots__ = ("lengths", "values")

    def __init__(
        self,
        outcomes: bytes,
        errors: dict[int, MoonpoolError],
        lengths: list[int],
        values: list[bytes | None] | None,
    ) -> None:
        super().__init__(outcomes, errors)
        self.lengths = lengths
        self.values = values

    def __getitem__(self, index: int) -> bytes | None:
        if self.values is None:
            raise TypeError("get_into leaves the bytes in the destinations")
        return self.values[index]

    def __iter__(self) -> Iterator[bytes | None]:
        if self.values is None:
            raise TypeError("get_into leaves the bytes in the destinations")
        return iter(self.values)
