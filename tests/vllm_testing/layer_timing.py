# SPDX-License-Identifier: Apache-2.0
"""Layer by layer against sync: ``PYTHONPATH=tests .venv-vllm-0.32.0/bin/python -m vllm_testing.layer_timing``.

The link is made so slow that a layer takes as long to come as to compute. Not a test: it says how fast something is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.store_client import StoreClient
from vllm_testing import models
from vllm_testing.engines import Engine, connector_of
from vllm_testing.prompts import prompt

CHUNK = 256
MODES = ("sync", "layerwise")


class Link:
    """Makes every get take as long as its bytes take at some rate.

    Attributes:
        rate: bytes a second; 0: as fast as it is.
        nbytes: that came.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rate = 0.0
        self.nbytes = 0
        real = StoreClient.get_into

        def get_into(client: StoreClient, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            got = real(client, *args, **kwargs)
            nbytes = sum(got.lengths)
            self.nbytes += nbytes
            if self.rate:
                time.sleep(max(0.0, begun + nbytes / self.rate - time.perf_counter()))
            return got

        patch.setattr(StoreClient, "get_into", get_into)


def engine_of(model: Path, cluster: LocalCluster, load_mode: str) -> Engine:
    """Make an engine that loads in one of the modes."""
    connector = connector_of(
        cluster, chunk_tokens=CHUNK, load_mode=load_mode, load_timeout=600.0, staging_bytes=64 << 20, tenant="layers"
    )
    return Engine(model, connector, blocks=300, max_model_len=4096, max_num_batched_tokens=4096)


def first_token(engine: Engine, tokens: list[int], cached: int) -> float:
    """Return the seconds until the first token, of which so many come from the pool."""
    engine.settle()
    engine.forget()
    begun = time.perf_counter()
    (answer,) = engine.ask(tokens, tokens=1)
    seconds = time.perf_counter() - begun
    assert answer.cached == cached, answer.cached
    return seconds


def layer_seconds(engine: Engine, run: Callable[[], object]) -> float:
    """Return how long a layer computes."""
    times: list[float] = []
    connector = engine.worker_connector
    real = connector.wait_for_layer_load

    def wait(name: str) -> None:
        times.append(time.perf_counter())
        real(name)

    connector.wait_for_layer_load = wait
    run()
    del connector.wait_for_layer_load
    return statistics.median(later - before for before, later in itertools.pairwise(times))


def main() -> None:
    """Measure, and write a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="each with an engine of either mode")
    parser.add_argument("--asks", type=int, default=3, help="of each engine in a round")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--loaded", type=int, default=1536, help="tokens that come from the pool")
    parser.add_argument("--computed", type=int, default=2304, help="tokens that do not")
    arguments = parser.parse_args()
    prefix = prompt(arguments.loaded, "layers")
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(nodes=1, dram="1GiB") as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        model = models.llama(Path(folder), layers=arguments.layers)
        link, fresh = Link(patch), iter(range(1 << 30))

        def ask(engine: Engine) -> float:
            # Another end each time, so that only the prefix is in the pool.
            return first_token(engine, [*prefix, *prompt(arguments.computed, "end", next(fresh))], arguments.loaded)

        with engine_of(model, cluster, "sync") as engine:
            engine.ask(prefix, tokens=1)
            engine.settle()
        rounds = []
        for round_ in range(arguments.rounds):
            times: dict[str, float] = {}
            seconds = 0.0
            for mode in MODES if round_ % 2 else MODES[::-1]:
                with engine_of(model, cluster, mode) as engine:
                    ask(engine)
                    if not seconds:
                        # Other work on the machine makes it another one in each round.
                        link.rate, link.nbytes = 0.0, 0
                        seconds = layer_seconds(engine, lambda: [ask(engine) for _ in range(arguments.asks)])
                        link.rate = link.nbytes / arguments.asks / arguments.layers / seconds
                    times[mode] = statistics.median(ask(engine) for _ in range(arguments.asks))
            rounds.append(
                {mode: round(its * 1e3, 1) for mode, its in times.items()} | {"layer": round(seconds * 1e3, 2)}
            )
    ratios = [one["sync"] / one["layerwise"] for one in rounds]
    found = {"sync_over_layerwise": round(statistics.median(ratios), 3), "ratios": [round(one, 3) for one in ratios]}
    sys.stdout.write(json.dumps(found | {"rounds_ms": rounds}) + "\n")


if __name__ == "__main__":
    main()
