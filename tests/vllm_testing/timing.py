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
        cpu: the same of the time that the thread had a core, which a busy machine does not change much.
        calls: by the name of the hook.
    """

    def __init__(self, *connectors: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inside = False
        for connector in {id(one): one for one in connectors}.values():
            for name in dir(type(connector)):
                if not name.startswith("_") and callable(getattr(type(connector), name)):
                    setattr(connector, name, self._measured(name, getattr(connector, name)))
        self._call_seconds, self._call_cpu = self._own()

    def total(self) -> tuple[float, float]:
        """Return the seconds, and those of the core, of all hooks, without what measuring takes."""
        calls = sum(self.calls.values())
        return sum(self.seconds.values()) - self._call_seconds * calls, sum(self.cpu.values()) - self._call_cpu * calls

    def clear(self) -> None:
        """Begin again."""
        self.seconds.clear()
        self.cpu.clear()
        self.calls.clear()

    def _measured(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # One hook calls another.
                return hook(*args, **kwargs)
            self._inside = True
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self.cpu[name] += time.thread_time() - begun_cpu
                self.seconds[name] += time.perf_counter() - begun
                self.calls[name] += 1
                self._inside = False

        return call

    def _own(self) -> tuple[float, float]:
        empty = self._measured("", lambda: None)
        for _ in range(20_000):
            empty()
        calls = self.calls.pop("")
        return self.seconds.pop("") / calls, self.cpu.pop("") / calls


def hooks_per_step(model: Path, cluster: LocalCluster, rounds: int) -> dict[str, Any]:
    """Return what the hooks take of a step, when nothing is reused and everything is saved."""
    shares, shares_cpu, micros, micros_cpu, steps_ms, by_hook = [], [], [], [], [], []
    with Engine(
        model, connector_of(cluster, chunk_tokens=256, staging_bytes=64 << 20, tenant="hooks"), blocks=600
    ) as engine:
        hooks = Hooks(engine.connector, engine.worker_connector)
        for round_ in range(rounds):
            for index in range(REQUESTS):
                engine.add(prompt(PROMPT_TOKENS, "hooks", round_, index), TOKENS)
            hooks.clear()
            steps, begun, begun_cpu = 0, time.perf_counter(), time.thread_time()
            while engine.engine.has_unfinished_requests():
                engine.step()
                steps += 1
            seconds, cpu = time.perf_counter() - begun, time.thread_time() - begun_cpu
            took, took_cpu = hooks.total()
            shares.append(took / seconds)
            shares_cpu.append(took_cpu / cpu)
            micros.append(took / steps * 1e6)
            micros_cpu.append(took_cpu / steps * 1e6)
            steps_ms.append(seconds / steps * 1e3)
            by_hook.append({name: of_hook / steps * 1e6 for name, of_hook in hooks.cpu.items()})
            engine.settle()
    most = sorted(by_hook[-1].items(), key=lambda item: -item[1])[:6]
    return {
        "hooks_us_per_step": round(statistics.median(micros), 1),
        "hooks_cpu_us_per_step": round(statistics.median(micros_cpu), 1),
        "step_ms": round(statistics.median(steps_ms), 2),
        "share": round(statistics.median(shares), 5),
        "share_of_cpu": round(statistics.median(shares_cpu), 5),
        "most_cpu_us": {name: round(value, 1) for name, value in most},
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
