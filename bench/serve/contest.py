# SPDX-License-Identifier: Apache-2.0
"""Several servers that are asked the same, round by round and in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moonpool.bench.errors import BenchError, UsageError
from moonpool.bench.serve.asking import Place, Server
from moonpool.bench.serve.rounds import Round, run_round
from moonpool.bench.serve.scraping import counted, difference
from moonpool.bench.serve.speech import TOKENS_FIRST, Spelling, TokenSpelling, WordSpelling
from moonpool.bench.serve.workload import Conversation, Seed, Workload

__all__ = ["Contest", "ServeOptions", "Variant"]

#: Token ids that practically every model knows, where nothing is said about it.
_VOCABULARY: Final = 30_000


@dataclass(frozen=True)
class ServeOptions:
    """How servers are asked.

    Attributes:
        rounds: how often the workload is asked of each.
        rate: conversations that begin in a second, on average; None: not so.
        concurrency: requests under way at a time; None: the workload, or `rate`, says when they come.
        warmup: requests ahead of everything, of each server, whose answers do not count.
        timeout: seconds that a request may take.
        seed: of everything that is asked.
        same_prompts: every round asks the same, so that what an earlier one has left in caches is found.
        text: prompts are words, not token ids.
        vocabulary: token ids are below this; None: below `_VOCABULARY`, or what a server says if that is less.
        plain: only what OpenAI's own interface has.
        model: what the servers call it; None: the first that they have.
    """

    rounds: int
    rate: float | None
    concurrency: int | None
    warmup: int
    timeout: float
    seed: int
    same_prompts: bool = False
    text: bool = False
    vocabulary: int | None = None
    plain: bool = False
    model: str | None = None


@dataclass
class Variant:
    """One server, and what came of it.

    Attributes:
        name: what it is called.
        model: the model that it was asked for.
        rounds: by number; only complete ones.
        gone: why it takes no part any more; empty: it does.
    """

    name: str
    model: str = ""
    rounds: dict[int, Round] = field(default_factory=dict)
    gone: str = ""


class Contest:
    """Everything that is asked of several servers.

    Args:
        places: of each, by name. The others are compared with the first one.
        workload: what is asked.
        options: how.
        show: is told what is done.
    """

    def __init__(
        self, places: Mapping[str, Place], workload: Workload, options: ServeOptions, show: Callable[[str], None]
    ) -> None:
        self._places = places
        self._workload = workload
        self._options = options
        self._show = show
        self._servers: dict[str, Server] = {}
        self._vocabulary = options.vocabulary or _VOCABULARY
        self.variants = {name: Variant(name) for name in places}

    async def run(self) -> None:
        """Ask all rounds. What is complete is in `variants`, whatever happens.

        Raises:
            BenchError: a server cannot be reached at the beginning, or none is left.
            UsageError: the servers do not know enough tokens.
        """
        async with contextlib.AsyncExitStack() as stack:
            for name, place in self._places.items():
                server = Server(place, self._options.timeout, plain=self._options.plain)
                self._servers[name] = await stack.enter_async_context(server)
            await self._meet()
            for name in self._servers:
                await self._warm_up(name)
            names = list(self._servers)
            for number in range(1, self._options.rounds + 1):
                # Everyone is first as often as the others.
                first = (number - 1) % len(names)
                await self._round(number, names[first:] + names[:first])

    async def _meet(self) -> None:
        """Find out whether all are there, and what their models are called."""
        known = [self._vocabulary]
        for name, server in self._servers.items():
            self._show(f"asking {name} for its models")
            model = await server.models()
            server.model = self.variants[name].model = self._options.model or model["id"]
            # Engines that were started for this tell it; others may mean something else by it.
            size = model.get("vocab_size")
            if type(size) is int and size > 0:
                known.append(size)
        if self._options.vocabulary is None:
            self._vocabulary = min(known)
        if not self._options.text and self._vocabulary <= TOKENS_FIRST:
            raise UsageError(
                f"a vocabulary of {self._vocabulary} tokens: {TOKENS_FIRST + 1} are the least", hint="--vocab"
            )

    async def _warm_up(self, name: str) -> None:
        # A seed that no round has: what is asked now is in no cache that matters.
        seed = Seed(self._options.seed, 0)
        begins = [Conversation(one.turns[:1]) for one in self._workload.conversations(seed, None)]
        begins = begins[: self._options.warmup]
        if begins:
            self._show(f"warming up {name}")
            self._judge(name, await run_round(self._servers[name], begins, self._spelling(seed), 0, 1))

    async def _round(self, number: int, names: Sequence[str]) -> None:
        seed = Seed(self._options.seed, 1 if self._options.same_prompts else number)
        for name in names:
            variant = self.variants[name]
            if variant.gone:
                continue
            self._show(f"round {number} of {self._options.rounds}: {name}")
            server = self._servers[name]
            conversations = self._workload.conversations(seed, self._options.rate)
            before = await server.metrics()
            done = await run_round(server, conversations, self._spelling(seed), number, self._options.concurrency)
            after = await server.metrics()
            if before is not None and after is not None:
                done.grown = difference(counted(before), counted(after))
            variant.rounds[number] = done
            self._judge(name, done)

    def _judge(self, name: str, done: Round) -> None:
        """Leave a server out that is of no use."""
        variant = self.variants[name]
        variant.gone = done.gone
        if not done.asked and not done.gone:
            failure, detail = next(iter(done.details.items()))
            variant.gone = f"nothing came of any request: {failure}: {detail}"
        if all(one.gone for one in self.variants.values()):
            raise BenchError(
                "no server is left: " + "; ".join(f"{one.name}: {one.gone}" for one in self.variants.values()),
                hint="its log",
            )

    def _spelling(self, seed: Seed) -> Spelling:
        return WordSpelling(seed) if self._options.text else TokenSpelling(seed, self._vocabulary)

    def describe(self) -> dict[str, Any]:
        """Return what was found out about the servers, as JSON values."""
        return {
            "vocabulary": None if self._options.text else self._vocabulary,
            "models": {name: variant.model for name, variant in self.variants.items()},
        }
