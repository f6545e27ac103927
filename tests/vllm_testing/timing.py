# SPDX-License-Identifier: Apache-2.0
"""What the connector costs an engine: ``PYTHONPATH=tests .venv-vllm-0.32.0/bin/python -m vllm_testing.timing``.

Not a test: it says how fast something is, on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.cluster import LocalCluster, local_cluster
from vllm_testing import models
from vllm_testing.engines import Engine, connector_of
from vllm_testing.gates import Gate
from vllm_testing.prompts import prompt

REQUESTS = 16
PROMPT_TOKENS = 300
TOKENS = 200
# Longer than two requests take: the link is as slow as that.
SLOW_SECONDS = 30.0


class Hooks:
    """Measures every call that vLLM makes of a connector.

    Attributes:
        seconds: by the name of the hook.
        calls: by the name of the hook.
    """

    def __init__(self, *connectors: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inside = False
        for connector in {id(one): one for one in connectors}.values():
            for name in dir(type(connector)):
                if not name.startswith("_") and callable(getattr(type(connector), name)):
                    setattr(connector, name, self._measured(name, getattr(connector, name)))
        self._call_seconds = self._own()

    def total(self) -> float:
        """Return the seconds of all hooks, without what measuring takes."""
        return sum(self.seconds.values()) - self._call_seconds * sum(self.calls.values())

    def clear(self) -> None:
        """Begin again."""
        self.seconds.clear()
        self.calls.clear()

    def _measured(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # One hook calls another.
                return hook(*args, **kwargs)
            self._inside = True
            begun = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begun
                self.calls[name] += 1
                self._inside = False

        return call

    def _own(self) -> float:
        empty = self._measured("", lambda: None)
        for _ in range(20_000):
            empty()
        return self.seconds.pop("") / self.calls.pop("")


def hooks_per_step(model: Path, cluster: LocalCluster, rounds: int) -> dict[str, Any]:
    """Return what the hooks take of a step, when nothing is reused and everything is saved."""
    shares, micros, steps_ms, by_hook = [], [], [], []
    with Engine(
        model, connector_of(cluster, chunk_tokens=256, staging_bytes=64 << 20, tenant="hooks"), blocks=600
    ) as engine:
        hooks = Hooks(engine.connector, engine.worker_connector)
        for round_ in range(rounds):
            for index in range(REQUESTS):
                engine.add(prompt(PROMPT_TOKENS, "hooks", round_, index), TOKENS)
            hooks.clear()
            steps, begun = 0, time.perf_counter()
            while engine.engine.has_unfinished_requests():
                engine.step()
                steps += 1
            seconds = time.perf_counter() - begun
            shares.append(hooks.total() / seconds)
            micros.append(hooks.total() / steps * 1e6)
            steps_ms.append(seconds / steps * 1e3)
            by_hook.append({name: took / steps * 1e6 for name, took in hooks.seconds.items()})
            engine.settle()
    most = sorted(by_hook[-1].items(), key=lambda item: -item[1])[:6]
    return {
        "hooks_us_per_step": round(statistics.median(micros), 1),
        "step_ms": round(statistics.median(steps_ms), 2),
        "share": round(statistics.median(shares), 5),
        "most_us": {name: round(value, 1) for name, value in most},
    }


def with_and_without(model: Path, cluster: LocalCluster, rounds: int) -> dict[str, Any]:
    """Return the ratio of the times of the same work, engines with and without taking turns."""

    def run(connector: dict[str, Any] | None, round_: int) -> float:
        with Engine(model, connector, blocks=600) as engine:
            engine.ask(prompt(100, "warm"))
            engine.settle()
            begun = time.perf_counter()
            engine.ask(*(prompt(PROMPT_TOKENS, "turns", round_, index) for index in range(REQUESTS)), tokens=TOKENS)
            return time.perf_counter() - begun

    ratios = []
    for round_ in range(rounds):
        connector = connector_of(cluster, chunk_tokens=256, staging_bytes=64 << 20, tenant="turns")
        order = [connector, None] if round_ % 2 else [None, connector]
        times = {one is not None: run(one, round_) for one in order}
        ratios.append(times[True] / times[False])
    return {"with_over_without": round(statistics.median(ratios), 4), "rounds": [round(one, 4) for one in ratios]}


def beside_a_slow_load(model: Path, cluster: LocalCluster, rounds: int) -> dict[str, Any]:
    """Return how much longer two requests take while a third one loads over a slow link."""
    slow = prompt(600, "slow")
    ratios = []
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, "get_into")
        connector = connector_of(
            cluster,
            chunk_tokens=256,
            staging_bytes=64 << 20,
            tenant="slow",
            load_timeout=2 * SLOW_SECONDS,
        )
        with Engine(model, connector, blocks=600) as engine:
            engine.ask(slow)
            engine.settle()

            def two(name: str, round_: int) -> float:
                begun = time.perf_counter()
                names = [engine.add(prompt(PROMPT_TOKENS, name, round_, index), TOKENS) for index in range(2)]
                engine.run(lambda: all(engine.answers[one].finished for one in names))
                return time.perf_counter() - begun

            for round_ in range(rounds):
                engine.forget()
                alone = two("alone", round_)
                engine.settle()
                engine.forget()
                with gate.shut():
                    third = engine.add(slow)
                    engine.run(gate.arrived.is_set)
                    beside = two("beside", round_)
                    assert engine.answers[third].finished is None
                engine.run()
                assert engine.answers[third].cached == 512
                ratios.append(beside / alone)
                engine.settle()
    return {"beside_over_alone": round(statistics.median(ratios), 4), "rounds": [round(one, 4) for one in ratios]}


def main() -> None:
    """Measure, and write a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("only", nargs="*", help="hooks, turns, slow; all of them when none is named")
    arguments = parser.parse_args()
    measures = {"hooks": hooks_per_step, "turns": with_and_without, "slow": beside_a_slow_load}
    with tempfile.TemporaryDirectory() as folder, local_cluster(nodes=1, dram="1GiB") as cluster:
        model = models.llama(Path(folder), layers=arguments.layers)
        for name, measure in measures.items():
            if not arguments.only or name in arguments.only:
                sys.stdout.write(json.dumps({name: measure(model, cluster, arguments.rounds)}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
