# SPDX-License-Identifier: Apache-2.0
"""Random operations on an engine and its pool, with a checker.

``PYTHONPATH=tests .venv-vllm-0.32.0/bin/python -m vllm_testing.random_run --operations 500 --seed 1``
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store_testing import locate, spoil

from moonpool.cluster import LocalCluster
from moonpool.errors import MoonpoolError
from moonpool.store_client import packing
from vllm_testing.engines import Engine, connector_of
from vllm_testing.gates import Puts
from vllm_testing.prompts import prompt

__all__ = ["RandomRun"]

TOKENS_MAX = 64
# Short, so that what is gone is given up soon.
_SETTINGS = {
    "lookup_timeout": 0.3,
    "load_timeout": 1.0,
    "save_timeout": 1.0,
    "retry": 0.1,
}
_LOAD_MODES = ("sync", "layerwise", "async", "prefetch")
_RUNNING_MAX = 12
_SETTLE_SECONDS = 60.0
_LEASE_SECONDS = 30.0


class RandomRun:
    """An engine with few blocks, a pool of two nodes, and what may happen to both.

    Args:
        model: of the engine.
        cluster: with two nodes; broken and mended again.
        expected: the tokens of an engine without connector: ``expected(prompt, tokens)``.
        seed: decides everything but the timing.
        puts: listens to this process.

    Attributes:
        done: how often what was done, and what came of it.
    """

    def __init__(
        self,
        model: Path,
        cluster: LocalCluster,
        expected: Callable[[list[int], int], list[int]],
        seed: int,
        puts: Puts,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._cluster = cluster
        self._puts = puts
        documents = [prompt(self._chance.randrange(100, 260), "document", index) for index in range(5)]
        prompts = [
            prompt(self._chance.randrange(1, 90), "question", index, after=self._chance.choice(documents))
            for index in range(14)
        ]
        self._expected = [(one, expected(one, TOKENS_MAX)) for one in prompts]
        self._running: dict[str, tuple[list[int], int]] = {}
        self._master_stopped = False
        self._nodes = {0: True, 1: True}
        self._engine = Engine(
            model,
            connector_of(cluster, load_mode=self._chance.choice(_LOAD_MODES), saving_blocks_max=0.5, **_SETTINGS),
            blocks=26,
            max_num_batched_tokens=256,
        )

    def run(self, operations: int) -> None:
        """Do so many operations, mend everything, and check what is left.

        Raises:
            AssertionError: tokens that are wrong, or something that is left.
        """
        with self._engine:
            choices: list[tuple[int, Callable[[], None]]] = [
                (30, self._add),
                (45, self._step),
                (8, self._abort),
                (4, self._forget),
                (3, self._stop_or_continue_master),
                (2, self._restart_master),
                (4, self._kill_or_start_node),
                (4, self._spoil),
            ]
            weights = [weight for weight, _ in choices]
            for _ in range(operations):
                (operation,) = self._chance.choices([one for _, one in choices], weights)
                operation()
            self._mend()
            self._engine.run()
            self._check_ended()
            self._engine.settle(_SETTLE_SECONDS)
            self._check_nothing_is_left()

    # ---------------------------------------------------------------- the engine

    def _add(self) -> None:
        if len(self._running) >= _RUNNING_MAX:
            self._step()
            return
        self.done["add"] += 1
        ask, tokens = self._chance.choice(self._expected)
        count = self._chance.randrange(1, TOKENS_MAX)
        self._running[self._engine.add(ask, count)] = (tokens, count)

    def _step(self) -> None:
        for _ in range(self._chance.randrange(1, 12)):
            self.done["step"] += 1
            before = self._states()
            self._engine.step()
            after = self._states()
            self.done["preempted"] += sum(
                after[name] == "PREEMPTED" and before[name] != "PREEMPTED" for name in self._running
            )
        self._check_ended()

    def _abort(self) -> None:
        if self._running:
            name = self._chance.choice(list(self._running))
            self.done[f"abort {self._engine.state(name)}"] += 1
            self._engine.abort(name)
            self._check(name, aborted=True)

    def _forget(self) -> None:
        self.done["forget"] += 1
        self._engine.forget(connector=self._chance.random() < 0.5)

    def _states(self) -> dict[str, str | None]:
        return {name: self._engine.state(name) for name in self._running}

    # ---------------------------------------------------------------- the pool

    def _stop_or_continue_master(self) -> None:
        self.done["stop or continue master"] += 1
        self._master_stopped = not self._master_stopped
        self._cluster.signal_master(0, signal.SIGSTOP if self._master_stopped else signal.SIGCONT)

    def _restart_master(self) -> None:
        self.done["restart master"] += 1
        self._master_stopped = False
        self._cluster.restart_master()

    def _kill_or_start_node(self) -> None:
        index = self._chance.choice(list(self._nodes))
        if self._nodes[index]:
            self.done["kill node"] += 1
            self._cluster.kill_node(index)
            self._nodes[index] = False
        elif not self._master_stopped:
            self.done["start node"] += 1
            self._cluster.start_node(index)
            self._nodes[index] = True

    def _spoil(self) -> None:
        if self._master_stopped or not self._puts.chunks:
            return
        namespace, key, shard = self._chance.choice(sorted(self._puts.chunks))
        try:
            with self._cluster.client(timeout=2.0, startup_timeout=2.0) as client:
                (extents,) = locate(client, namespace, [key], shard)
                if int(extents[0]["segment"]) != packing.NO_SEGMENT:
                    spoil(client, extents[0], packing.HEADER_BYTES + 4096, b"\x00\x00\x00\x80" * 1024)
                    self.done["spoil"] += 1
        except MoonpoolError:
            # Where it was is gone by now.
            self.done["spoil nothing"] += 1

    def _mend(self) -> None:
        if self._master_stopped:
            self._stop_or_continue_master()
        for index, there in self._nodes.items():
            if not there:
                self._cluster.start_node(index)
                self._nodes[index] = True

    # ---------------------------------------------------------------- checks

    def _check_ended(self) -> None:
        for name in [name for name in self._running if self._engine.answers[name].finished]:
            self._check(name)

    def _check(self, name: str, *, aborted: bool = False) -> None:
        tokens, count = self._running.pop(name)
        answer = self._engine.answers[name]
        assert answer.tokens == tokens[: len(answer.tokens)], f"{name}: wrong tokens"
        if not aborted:
            assert (answer.finished, len(answer.tokens)) == ("length", count), name
            self.done["tokens"] += count
            self.done["tokens cached"] += answer.cached

    def _check_nothing_is_left(self) -> None:
        assert not self._running
        assert not self._engine.scheduler.requests
        with self._cluster.client() as client:

            def left() -> dict[str, Any]:
                stats = client.master_stats()
                index = stats["index"]
                leased = index["leased_until_ms"] / 1000 > time.time()
                return {"pins": stats["pins"], "pinned": index["pinned"], "writing": index["writing"], "leased": leased}

            end = time.monotonic() + _LEASE_SECONDS
            while any((found := left()).values()):
                assert time.monotonic() < end, f"left at the master: {found}"
                self._engine.step()
                time.sleep(0.1)


def main() -> None:
    """Run it from the command line."""
    import argparse
    import sys
    import tempfile

    import pytest

    from moonpool.cluster import local_cluster
    from vllm_testing import models
    from vllm_testing.driver import EngineProcess

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        model = models.llama(Path(folder))
        with (
            local_cluster(nodes=2, dram="16MiB") as cluster,
            EngineProcess(model, enable_prefix_caching=False) as reference,
        ):
            run = RandomRun(
                model,
                cluster,
                lambda ask, tokens: reference.ask(ask, tokens=tokens)[0]["tokens"],
                arguments.seed,
                Puts(patch),
            )
            try:
                run.run(arguments.operations)
            finally:
                sys.stdout.write(f"seed {arguments.seed}: {dict(run.done)}\n")


if __name__ == "__main__":
    main()
