# SPDX-License-Identifier: Apache-2.0
"""Traces of kinds that the published one is not, for eviction policies to be tried on. A seed makes the same again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from moonpool.bench.replay.trace import Trace

Requests = list[list[int]]


class _Blocks:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._next = itertools.count()

    def new(self, least: int, most: int | None = None) -> list[int]:
        size = least if most is None else self.random.randint(least, most)
        return list(itertools.islice(self._next, size))


def _zipf(count: int, exponent: float) -> list[float]:
    return list(itertools.accumulate(1 / rank**exponent for rank in range(1, count + 1)))


def chats(seed: int, requests: int, live: int = 400) -> Requests:
    """Turns of live chats, the most recent ones most often (Zipf over recency): what LRU is made for."""
    blocks = _Blocks(seed)
    weights = _zipf(live, 1.0)
    system = blocks.new(2)
    chats = [system + blocks.new(1, 8) for _ in range(live)]
    made = []
    for _ in range(requests):
        (place,) = blocks.random.choices(range(live), cum_weights=weights)
        # The last block was not full, so it is another one in the next turn.
        chat = chats.pop(place)[:-1] + blocks.new(1, 4)
        made.append(chat)
        if blocks.random.random() > 0.85 or len(chat) > 120:
            chat = system + blocks.new(1, 8)
        chats.insert(0, chat)
    return made


def popular(seed: int, requests: int, live: int = 1500) -> Requests:
    """Turns of chats of which some are always busier than others (Zipf over chats)."""
    blocks = _Blocks(seed)
    weights = _zipf(live, 0.9)
    system = blocks.new(2)
    chats = [system + blocks.new(2, 10) for _ in range(live)]
    made = []
    for _ in range(requests):
        (place,) = blocks.random.choices(range(live), cum_weights=weights)
        chat = chats[place][:-1] + blocks.new(1, 3)
        made.append(chat)
        chats[place] = chat if len(chat) <= 80 else system + blocks.new(2, 10)
    return made


def scans(seed: int, requests: int, prompts: int = 20) -> Requests:
    """Requests that come once, behind one of a few long system prompts."""
    blocks = _Blocks(seed)
    weights = _zipf(prompts, 1.0)
    systems = [blocks.new(40) for _ in range(prompts)]
    return [
        blocks.random.choices(systems, cum_weights=weights)[0] + blocks.new(5, 40) for _ in range(requests)
    ]  # fmt: skip


def bursts(seed: int, requests: int, live: int = 150, burst: int = 400) -> Requests:
    """Chats, and then as many requests that come once, in turn."""
    blocks = _Blocks(seed)
    system = blocks.new(8)
    chats = [system + blocks.new(5) for _ in range(live)]
    made = []
    for number in range(requests):
        if number // burst % 2:
            made.append(system + blocks.new(20, 60))
            continue
        place = blocks.random.randrange(live)
        chat = chats[place][:-1] + blocks.new(1, 4)
        made.append(chat)
        chats[place] = chat if len(chat) <= 80 else system + blocks.new(5)
    return made


def shifts(seed: int, requests: int, documents: int = 150, phases: int = 5) -> Requests:
    """Questions about documents, all of which are replaced by others several times."""
    blocks = _Blocks(seed)
    weights = _zipf(documents, 0.8)
    made = []
    for _ in range(phases):
        current = [blocks.new(10, 40) for _ in range(documents)]
        picked = blocks.random.choices(current, cum_weights=weights, k=requests // phases)
        made += [document + blocks.new(1, 6) for document in picked]
    return made


def agents(seed: int, requests: int, live: int = 60) -> Requests:
    """Agents of a few kinds: long common prefixes, tasks below them, steps below those, and now and then a branch."""
    blocks = _Blocks(seed)
    tasks = [[kind + blocks.new(20) for _ in range(8)] for kind in (blocks.new(60) for _ in range(6))]
    running: Requests = []
    made = []
    for _ in range(requests):
        if len(running) < live or blocks.random.random() < 0.03:
            running.append(blocks.random.choice(blocks.random.choice(tasks)) + blocks.new(5))
        elif blocks.random.random() < 0.1:
            whole = blocks.random.choice(running)
            running.append(whole[: blocks.random.randint(80, len(whole))] + blocks.new(3))
        del running[:-live]
        place = blocks.random.randrange(len(running))
        step = running[place][:-1] + blocks.new(1, 5)
        made.append(step)
        if len(step) > 200:
            del running[place]
        else:
            running[place] = step
    return made


def uniform(seed: int, requests: int, documents: int = 800) -> Requests:
    """Documents that are all as likely as each other: nothing to be learned."""
    blocks = _Blocks(seed)
    all_of_them = [blocks.new(5, 25) for _ in range(documents)]
    return [blocks.random.choice(all_of_them) + blocks.new(1) for _ in range(requests)]


KINDS: dict[str, Callable[[int, int], Requests]] = {
    kind.__name__: kind for kind in (chats, popular, scans, bursts, shifts, agents, uniform)
}


def trace(requests: Requests) -> Trace:
    """Number the blocks as a trace has them; the names stay."""
    numbers: dict[int, int] = {}
    numbered = [[numbers.setdefault(name, len(numbers)) for name in request] for request in requests]
    return Trace(numbered, list(numbers))
