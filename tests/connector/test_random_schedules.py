# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""Random lives in vLLM's scheduler: nothing leaks, everything ends, and every token is computed from its own.

What is wrong is found by the contents of cells: see `connector_testing.rig`.
"""

from __future__ import annotations

import random

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing.rig import SALT, Rig, rig

pytestmark = THEIR_WARNINGS

SEEDS = range(6)
STEPS = 600


class Life:
    """One random life."""

    def __init__(self, made: Rig, seed: int, *, drafts: bool = False) -> None:
        self.made = made
        self.random = random.Random(seed)
        self.drafts = self.random if drafts else None
        self.trunks = [[self.random.randrange(3, 500) for _ in range(260)] for _ in range(6)]
        self.most = 0

    def live(self, steps: int) -> None:
        actions = [
            (self.add, 3),
            (self.step, 12),
            (self.end_load, 3),
            (self.end_save, 3),
            (self.end_fetch, 3),
            (self.abort, 0.7),
            (self.evict, 0.3),
            (self.slow, 0.1),
            (self.quick, 0.4),
            (self.ill, 0.05),
            (self.well, 0.5),
            (self.reset, 0.1),
        ]
        calls, weights = zip(*actions, strict=True)
        for call in self.random.choices(calls, weights, k=steps):
            call()
            side = self.made.connector._scheduler
            self.most = max(self.most, side._saves.pinned_blocks)
            assert side._saves.pinned_blocks <= side._saves._blocks_max
            assert side._tracked.keys() == {
                name for name, one in self.made.scheduler.requests.items() if not one.is_finished()
            }
        self.well()
        self.made.check_end(steps=4000)

    def find(self) -> None:
        """What is saved is found, whatever became of all before."""
        hits = self.made.counts["hits"]
        for _ in range(2):
            self.made.wait_for_pool()
            self.made.reset()
            self.made.add(self.trunks[0], outputs=1)
            self.made.wait_for_lookups()
            self.made.check_end(steps=4000)
        assert self.made.counts["hits"] > hits, self.made.counts

    def add(self) -> None:
        if len(self.made.scheduler.requests) > 12:
            return
        trunk = self.random.choice(self.trunks)[: self.random.randrange(1, 260)]
        tail = [self.random.randrange(3, 500) for _ in range(self.random.choice((0, 0, 5, 40)))]
        salt = SALT if self.random.random() < 0.1 else None
        self.made.add(trunk + tail, outputs=self.random.choice((1, 3, 40)), cache_salt=salt)

    def step(self) -> None:
        if self.random.random() < 0.8 and self.made.pool.go_on.is_set():
            self.made.wait_for_lookups()
        self.made.step(self.drafts)

    def end_load(self) -> None:
        if self.made.loads:
            name = self.random.choice(sorted(self.made.loads))
            chunks = len(self.made.loads[name].hashes) // 32
            self.made.end_load(name, self.random.choice((None, None, self.random.randint(0, chunks))))

    def end_save(self) -> None:
        if self.made.saves:
            self.made.end_save(self.random.choice(sorted(self.made.saves)), saved=self.random.random() < 0.8)

    def end_fetch(self) -> None:
        if self.made.fetches:
            fetch_id = self.random.choice(sorted(self.made.fetches))
            chunks = len(self.made.fetches[fetch_id].hashes) // 32
            self.made.end_fetch(fetch_id, self.random.choice((None, None, self.random.randint(0, chunks))))

    def abort(self) -> None:
        alive = sorted(name for name, one in self.made.scheduler.requests.items() if not one.is_finished())
        if alive:
            self.made.abort(self.random.choice(alive))

    def evict(self) -> None:
        for key in self.random.sample(sorted(self.made.pool.chunks), k=min(3, len(self.made.pool.chunks))):
            del self.made.pool.chunks[key]

    def slow(self) -> None:
        self.made.pool.go_on.clear()

    def quick(self) -> None:
        self.made.pool.go_on.set()

    def ill(self) -> None:
        self.made.pool.failing = True

    def well(self) -> None:
        self.made.pool.failing = False
        self.made.pool.go_on.set()

    def reset(self) -> None:
        self.made.reset(reset_connector=self.random.random() < 0.2)


def settings(seed: int, mode: str) -> dict[str, object]:
    luck = random.Random(seed)
    return {
        "load_mode": mode,
        "saving_blocks_max": luck.choice((0.1, 0.25, 0.5)),
        "saves_max": luck.choice((1, 3, 100)),
        # A prefetch begins with an answer.
        "lookup_timeout": 1.0 if mode == "prefetch" else luck.choice((0.0, 0.005, 0.05)),
        "retry": 0.02,
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["sync", "async", "prefetch"])
def test_lives(seed: int, mode: str) -> None:
    with rig(settings(seed, mode), blocks=40, step_tokens=96, requests=6) as made:
        life = Life(made, seed)
        if mode == "sync":
            made.sync_good = lambda job: life.random.randint(0, len(job.hashes) // 32)
        life.live(STEPS)
        life.find()
        assert life.most


@pytest.mark.parametrize("seed", SEEDS)
def test_lives_with_drafts(seed: int) -> None:
    with rig(settings(seed, "async"), blocks=40, step_tokens=96, requests=6, drafts=3) as made:
        Life(made, seed, drafts=True).live(STEPS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["async", "prefetch"])
def test_lives_of_steps_that_run_ahead(seed: int, mode: str) -> None:
    with rig(settings(seed, mode), blocks=40, step_tokens=96, requests=6, ahead=True) as made:
        life = Life(made, seed)
        life.live(STEPS)
        life.find()
