# SPDX-License-Identifier: Apache-2.0
"""What is asked: conversations whose every token follows from a seed, so that all servers are asked the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from moonpool.bench.errors import UsageError
from moonpool.bench.replay.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.bench.replay.trace import Trace

__all__ = ["ANSWER", "Conversation", "MultiTurn", "Piece", "Seed", "SharedPrefix", "TraceWork", "Turn", "Workload"]

# What a piece is, or a random number is for: the first part of its name. Each has names of one length, because numpy
# does not tell a seed from the same one with a 0 behind it.
_TURN: Final = 0
_PREFIX: Final = 1
_SUFFIX: Final = 2
_BLOCK: Final = 3
_REST: Final = 4
_ARRIVALS: Final = 5
_THINKING: Final = 6
_GROUPS: Final = 7
#: What stands in for an answer.
ANSWER: Final = 8


@dataclass(frozen=True)
class Seed:
    """What all random numbers of one round follow from.

    Attributes:
        run: of the run, below 2^32.
        round: the round, or the same number for all rounds where they are to ask the same.
    """

    run: int
    round: int

    def generator(self, *name: int) -> np.random.Generator:
        """Return the random numbers with a name."""
        return np.random.default_rng((self.run, self.round, *name))


@dataclass(frozen=True)
class Piece:
    """Tokens that follow from a seed and a name: pieces with equal names are equal."""

    name: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    Attributes:
        adds: what the user says, behind all that was said before.
        output_tokens: how long the answer is.
        think_s: how long the user waits after the answer before.
    """

    adds: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """Requests one after the other, of which each has those before and their answers as the beginning of its prompt.

    Attributes:
        turns: the requests.
        due_s: when the first one comes, from the beginning of the round.
    """

    turns: tuple[Turn, ...]
    due_s: float = 0.0


class Workload(Protocol):
    """Makes the conversations of a round."""

    @property
    def kind(self) -> str:
        """What it is called on the command line."""
        ...

    def conversations(self, seed: Seed, rate: float | None) -> list[Conversation]:
        """Return them in the order in which they begin.

        Args:
            seed: of the round.
            rate: how many begin in a second, on average; None: all at once.
        """
        ...

    def parameters(self) -> dict[str, Any]:
        """Return what it was made with, as JSON values."""
        ...


@dataclass(frozen=True)
class MultiTurn:
    """Users who go on talking: each turn has everything before it as its prefix.

    Attributes:
        users: conversations.
        turns: of each.
        turn_tokens: what a user adds in a turn.
        output_tokens: of each answer.
        think_s: between an answer and the next turn, on average; exponentially distributed.
    """

    users: int
    turns: int
    turn_tokens: int
    output_tokens: int
    think_s: float
    kind: str = "multi-turn"

    def conversations(self, seed: Seed, rate: float | None) -> list[Conversation]:
        """Return one for each user."""
        thinking = seed.generator(_THINKING).exponential(self.think_s, (self.users, self.turns))
        return [
            Conversation(
                tuple(
                    Turn(
                        (Piece((_TURN, user, turn), self.turn_tokens),), self.output_tokens, float(thinking[user, turn])
                    )
                    for turn in range(self.turns)
                ),
                due_s,
            )
            for user, due_s in enumerate(_arrivals(seed, self.users, rate))
        ]

    def parameters(self) -> dict[str, Any]:
        """Return what it was made with, as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class SharedPrefix:
    """Requests that begin alike within a group, as with a system prompt, and end each in its own way.

    Attributes:
        groups: different prefixes, each as often as the others, in random order.
        requests: of all groups together.
        prefix_tokens: what the requests of a group share.
        suffix_tokens: what each has for itself.
        output_tokens: of each answer.
    """

    groups: int
    requests: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    kind: str = "shared-prefix"

    def conversations(self, seed: Seed, rate: float | None) -> list[Conversation]:
        """Return one, of one turn, for each request."""
        groups = seed.generator(_GROUPS).permutation(np.arange(self.requests) % self.groups).tolist()
        return [
            Conversation(
                (
                    Turn(
                        (
                            Piece((_PREFIX, groups[number]), self.prefix_tokens),
                            Piece((_SUFFIX, number), self.suffix_tokens),
                        ),
                        self.output_tokens,
                    ),
                ),
                due_s,
            )
            for number, due_s in enumerate(_arrivals(seed, self.requests, rate))
        ]

    def parameters(self) -> dict[str, Any]:
        """Return what it was made with, as JSON values."""
        return dataclasses.asdict(self)


class TraceWork:
    """The requests of a trace, at their times.

    Args:
        trace: the requests.
        facts: what is said of it, as JSON values.
        speed: how many times as fast.
        block_tokens: tokens of a block; where that is not what the trace has, all prompts are as much shorter.
        output_tokens_max: answers are cut to this; None: they are as long as in the trace.

    Raises:
        UsageError: a request has no tokens.
    """

    kind = "trace"

    def __init__(
        self, trace: Trace, facts: dict[str, Any], speed: float, block_tokens: int, output_tokens_max: int | None
    ) -> None:
        self._trace = trace
        self._facts = facts
        self._speed = speed
        self._block_tokens = block_tokens
        self._output_tokens_max = output_tokens_max
        if empty := sum(1 for prompt, _ in trace.tokens if prompt == 0):
            raise UsageError(f"{empty} requests of the trace have an input_length of 0, which no server takes")

    def conversations(self, seed: Seed, rate: float | None) -> list[Conversation]:
        """Return one, of one turn, for each request; the trace says when they come."""
        trace = self._trace
        begin = min(trace.times_ms)
        return [
            Conversation((self._turn(number),), (time_ms - begin) / 1e3 / self._speed)
            for number, time_ms in enumerate(trace.times_ms)
        ]

    def _turn(self, number: int) -> Turn:
        scale = self._block_tokens / BLOCK_TOKENS
        prompt, output = self._trace.tokens[number]
        left = max(1, round(prompt * scale))
        pieces = []
        for block in self._trace.requests[number]:
            taken = min(self._block_tokens, left)
            if taken:
                pieces.append(Piece((_BLOCK, block), taken))
            left -= taken
        if left:
            # Behind the blocks that have a hash: nobody else's.
            pieces.append(Piece((_REST, number), left))
        return Turn(tuple(pieces), max(1, min(output, self._output_tokens_max or output)))

    def parameters(self) -> dict[str, Any]:
        """Return what it was made with, as JSON values."""
        return {
            "kind": self.kind,
            "trace": self._facts,
            "speed": self._speed,
            "block_tokens": self._block_tokens,
            "output_tokens_max": self._output_tokens_max,
        }


def _arrivals(seed: Seed, count: int, rate: float | None) -> Sequence[float]:
    """Return when so many come: a Poisson process, or all at once."""
    if rate is None:
        return [0.0] * count
    times: NDArray[np.float64] = np.cumsum(seed.generator(_ARRIVALS).exponential(1 / rate, count))
    listed: list[float] = times.tolist()
    return listed
