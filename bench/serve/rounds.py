# SPDX-License-Identifier: Apache-2.0
"""One round: all conversations of a workload, with one server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from moonpool.bench.serve.asking import Answer
from moonpool.bench.serve.speech import Script, Spelling
from moonpool.bench.serve.workload import Conversation, Turn

__all__ = ["UNDER_WAY_MAX", "Asked", "Asking", "Round", "run_round"]

#: Requests under way at a time where the workload says when they come. What comes beyond that comes late, and is shown
#: as that.
UNDER_WAY_MAX: Final = 4096
#: A server is given up when nothing came of so many requests in a row, for so long.
_GONE_REQUESTS: Final = 3
_GONE_SECONDS: Final = 30.0


class Asking(Protocol):
    """What is asked: `moonpool.bench.serve.asking.Server`."""

    async def ask(self, prompt: list[int] | str, output_tokens: int) -> Answer:
        """Ask for a completion, and never fail: what went wrong is in the answer."""
        ...


@dataclass(frozen=True)
class Asked:
    """One request that was answered.

    Attributes:
        conversation: its number in the round.
        turn: from 0.
        late_s: how long after its time it was sent.
        answer: what came; without its tokens.
    """

    conversation: int
    turn: int
    late_s: float
    answer: Answer


@dataclass
class Round:
    """What came of a round.

    Attributes:
        number: from 1.
        conversations: of the workload.
        planned: their requests.
        seconds: from the beginning to the last answer.
        asked: requests that were answered.
        failures: how many others there were, by kind.
        details: of the first failure of each kind.
        stand_ins: answers that the server did not tell, so that others stand in for them in later prompts.
        gone: why the server was given up; empty: it was not.
        grown: by how much its counters have grown; None: it has none, or started anew.
    """

    number: int
    conversations: int = 0
    planned: int = 0
    seconds: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    stand_ins: int = 0
    gone: str = ""
    grown: dict[str, float] | None = None

    @property
    def dropped(self) -> int:
        """Requests that were not sent, or not waited for: an earlier turn failed, or the server was given up."""
        return self.planned - len(self.asked) - self.failures.total()

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.answer.tokens for one in self.asked)


async def run_round(
    server: Asking, conversations: Sequence[Conversation], spelling: Spelling, number: int, concurrency: int | None
) -> Round:
    """Ask everything, and wait for all answers.

    Args:
        server: is asked.
        conversations: of the round.
        spelling: of the round.
        number: of the round.
        concurrency: requests under way at a time, each sent when there is room; None: sent when they are due.
    """
    return await _Running(server, spelling, number, concurrency).run(conversations)


class _Running:
    def __init__(self, server: Asking, spelling: Spelling, number: int, concurrency: int | None) -> None:
        self._server = server
        self._spelling = spelling
        self._timed = concurrency is None
        # Who waits longest is next: users take turns.
        self._room = asyncio.Semaphore(concurrency or UNDER_WAY_MAX)
        self._round = Round(number)
        self._gone = asyncio.Event()
        self._futile = 0
        self._futile_since = 0.0

    async def run(self, conversations: Sequence[Conversation]) -> Round:
        self._round.conversations = len(conversations)
        self._round.planned = sum(len(conversation.turns) for conversation in conversations)
        self._begin = time.monotonic()
        talks = [
            asyncio.ensure_future(self._talk(number, conversation)) for number, conversation in enumerate(conversations)
        ]
        everything = asyncio.gather(*talks)
        gone = asyncio.ensure_future(self._gone.wait())
        either: list[asyncio.Future[Any]] = [everything, gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._gone.is_set():
                await everything
        finally:
            for task in (*talks, gone):
                task.cancel()
            await asyncio.gather(*talks, gone, everything, return_exceptions=True)
        self._round.seconds = time.monotonic() - self._begin
        return self._round

    async def _talk(self, number: int, conversation: Conversation) -> None:
        script = Script(self._spelling, number)
        due = self._begin + conversation.due_s
        for index, turn in enumerate(conversation.turns):
            if index:
                due = time.monotonic() + turn.think_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            answer = await self._turn(script, number, index, turn, due)
            if answer.failure:
                # There is nothing to go on from.
                return
            if index + 1 < len(conversation.turns):
                told = script.answered(answer.token_ids, answer.text, answer.tokens)
                self._round.stand_ins += not told
            # Figures are kept for the whole run, and what was said is not.
            answer.token_ids, answer.text = [], ""

    async def _turn(self, script: Script, number: int, index: int, turn: Turn, due: float) -> Answer:
        """Ask one request, and count what came of it."""
        async with self._room:
            prompt = script.say(turn)
            began = time.monotonic()
            answer = await self._server.ask(prompt, turn.output_tokens)
        self._note_patience(answer, began)
        if answer.failure:
            self._round.failures[answer.failure] += 1
            self._round.details.setdefault(answer.failure, answer.detail)
        else:
            self._round.asked.append(Asked(number, index, max(0.0, began - due) if self._timed else 0.0, answer))
        return answer

    def _note_patience(self, answer: Answer, began: float) -> None:
        if not answer.failure:
            self._futile = 0
            return
        self._futile += 1
        if self._futile == 1:
            self._futile_since = began
        seconds = time.monotonic() - self._futile_since
        if self._futile >= _GONE_REQUESTS and seconds >= _GONE_SECONDS:
            why = f"{answer.failure}: {answer.detail}"
            self._round.gone = f"nothing came of its last {self._futile} requests, for {seconds:.0f} s: {why}"
            self._gone.set()
