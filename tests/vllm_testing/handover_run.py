# SPDX-License-Identifier: Apache-2.0
"""Requests that two prefill engines hand over to a decode engine, of which each is killed or stopped at random.

``PYTHONPATH=tests .venv-vllm-0.32.0/bin/python -m vllm_testing.handover_run --requests 200 --seed 1``
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from moonpool.cluster import LocalCluster
from vllm_testing.driver import EngineEndedError, EngineProcess
from vllm_testing.engines import connector_of
from vllm_testing.prompts import prompt

__all__ = ["HandOverRun"]

_WANTED: Final = {"do_remote_decode": True, "do_remote_prefill": False}
_BLOCKS: Final = 120
_TOKENS_MAX: Final = 24
_LENGTH_MAX: Final = 420
_PREFILLS: Final = 2
#: Of a round of requests, that do not each wait for what is not there any more.
_ANSWER_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 1.5
_COUNTED: Final = ("handovers", "loads_direct", "loads_ok", "loads_failed", "loads_missing", "loads_late")
_STAGES: Final = ("computing", "computed", "handed over", "decoding")
_SETTINGS: Final = {
    "chunk_tokens": 128,
    "tenant": "handover-run",
    "handover_wait": 1.0,
    "peer_lease": 1.0,
    "lookup_timeout": 0.5,
    "load_timeout": 2.0,
    "save_timeout": 2.0,
    "saving_blocks_max": 1.0,
    "retry": 0.1,
}


class HandOverRun:
    """The engines, and what may happen to them.

    Args:
        model: of the engines.
        cluster: their pool.
        expected: the tokens of an engine without connector: ``expected(prompt, tokens)``.
        seed: decides everything but the timing.
        faults: how often of a hundred rounds something happens to an engine.
        direct: KV is read straight from the prefill engines, where that goes.

    Attributes:
        done: how often what was done, and what came of it.
    """

    def __init__(
        self,
        model: Path,
        cluster: LocalCluster,
        expected: Callable[[list[int], int], list[int]],
        seed: int,
        *,
        faults: int = 30,
        direct: bool = True,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._model = model
        self._cluster = cluster
        self._expected = expected
        self._chance = random.Random(seed)
        self._seed = seed
        self._faults = faults
        self._direct = direct
        self._engines: dict[str, EngineProcess] = {}
        self._timers: list[threading.Timer] = []
        self._killed: set[str] = set()

    def run(self, requests: int) -> None:
        """Run so many requests, and check what is left.

        Raises:
            AssertionError: tokens that are wrong, a request that got none, or blocks that nobody frees.
        """
        with contextlib.ExitStack() as engines:
            engines.callback(self._close)
            for name in ("prefill 0", "prefill 1", "decode"):
                self._start(name)
            while self.done["requests"] < requests:
                self._round(min(self._chance.randint(1, 6), requests - self.done["requests"]))
            for engine in self._engines.values():
                # All that is saved or held for somebody who never came is given up by then.
                engine.settle()
                assert engine.free_blocks() == _BLOCKS - 1

    # ---------------------------------------------------------------- engines

    def _start(self, name: str) -> None:
        role = "kv_consumer" if name == "decode" else "kv_producer"
        more = {"peer_listen": "127.0.0.1:0"} if self._direct and role == "kv_producer" else {}
        connector = {**connector_of(self._cluster, **_SETTINGS, **more), "kv_role": role}
        self._engines[name] = EngineProcess(self._model, connector, blocks=_BLOCKS)

    def _close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _break(self, name: str, stage: str, plan: tuple[str, str] | None) -> None:
        """Kill an engine, or stop it for a while, after a moment, where it is planned at this stage."""
        if plan is None or plan[0] != stage:
            return
        self.done[f"{plan[1]} {stage}"] += 1
        time.sleep(self._chance.choice((0.0, 0.01, 0.05, 0.2)))
        engine = self._engines[name]
        if plan[1] == "kill":
            self._killed.add(name)
            engine.kill()
            return
        engine.stop()
        timer = threading.Timer(_STOP_SECONDS, engine.go_on)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _mend(self) -> None:
        for timer in self._timers:
            timer.join()
        self._timers.clear()
        for name in self._killed:
            self._engines[name].close()
            self._start(name)
        self._killed.clear()

    # ---------------------------------------------------------------- requests

    def _round(self, count: int) -> None:
        """Hand some requests over at the same time. Something may happen to one of the engines at one of the stages."""
        lengths = [self._chance.randrange(1, _LENGTH_MAX) for _ in range(count)]
        prompts = [prompt(length, self._seed, self.done["requests"] + at) for at, length in enumerate(lengths)]
        tokens = self._chance.randint(2, _TOKENS_MAX)
        prefill = f"prefill {self._chance.randrange(_PREFILLS)}"
        plan = None
        if self._chance.randrange(100) < self._faults:
            plan = self._chance.choice(_STAGES), self._chance.choice(("kill", "stop"))
        self._engines[prefill].begin_ask(*prompts, tokens=1, params=[_WANTED] * count)
        self._break(prefill, "computing", plan)
        computed = self._answers(prefill) or [{"params": None}] * count
        self._break(prefill, "computed", plan)
        params = [one["params"] for one in computed]
        self.done["handed over"] += sum(one is not None for one in params)
        self._engines["decode"].begin_ask(*prompts, tokens=tokens, params=params)
        self._break(prefill, "handed over", plan)
        self._break("decode", "decoding", plan)
        answers = self._answers("decode")
        self._mend()
        if answers is None:
            # As a proxy does: another decode engine, here the one that was started instead.
            self.done["decoded again"] += count
            answers = self._engines["decode"].ask(*prompts, tokens=tokens, params=params)
        for one, answer in zip(prompts, answers, strict=True):
            assert answer["tokens"] == self._expected(one, tokens), f"seed {self._seed}: wrong tokens"
            self.done["tokens"] += tokens
        self.done["requests"] += count
        counts = self._engines["decode"].counts()
        self.done.update({name: number for name, number in counts.items() if name.startswith(_COUNTED)})

    def _answers(self, name: str) -> list[dict[str, Any]] | None:
        try:
            return self._engines[name].answers(_ANSWER_SECONDS)
        except EngineEndedError:
            # One that ends by itself had a request that never ended.
            if name not in self._killed:
                raise
            return None


def main() -> None:
    """Run it from the command line."""
    import argparse
    import sys
    import tempfile

    from moonpool.cluster import local_cluster
    from vllm_testing import models

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--through-pool", action="store_true", help="read nothing straight from prefill engines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = models.llama(Path(folder))
        with (
            local_cluster(nodes=2, dram="64MiB") as cluster,
            EngineProcess(model, enable_prefix_caching=False) as reference,
        ):
            run = HandOverRun(
                model,
                cluster,
                lambda ask, tokens: reference.ask(ask, tokens=tokens)[0]["tokens"],
                arguments.seed,
                direct=not arguments.through_pool,
            )
            try:
                run.run(arguments.requests)
            finally:
                sys.stdout.write(f"seed {arguments.seed}: {dict(run.done)}\n")


if __name__ == "__main__":
    main()
