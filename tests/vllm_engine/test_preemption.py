# SPDX-License-Identifier: Apache-2.0
"""Requests that are preempted while their blocks are saved: what the pool has is right (case V3)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_testing.engines import Engine, connector_of
from vllm_testing.gates import Gate, Puts
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64
Plain = Callable[..., list[int]]


@pytest.mark.parametrize("load_mode", ["sync", "layerwise", "async", "prefetch"])
def test_blocks_are_saved_before_others_write_them(
    llama: Path,
    shared_cluster: LocalCluster,
    plain: Plain,
    tenant: dict[str, Any],
    load_mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt(96, "preempted", load_mode, index) for index in range(5)]
    tokens = 130
    expected = [plain(one, tokens) for one in prompts]
    slow = connector_of(
        shared_cluster, load_mode=load_mode, saving_blocks_max=1.0, tenant=tenant["tenant"] + "preempted"
    )
    puts = Puts(monkeypatch)
    with monkeypatch.context() as patch:
        Gate(patch, "put", seconds=0.05)
        with Engine(llama, slow, blocks=18) as engine:
            preempted = 0
            names = [engine.add(one, tokens) for one in prompts]
            while engine.engine.has_unfinished_requests():
                before = {name: engine.state(name) for name in names}
                engine.step()
                preempted += sum(engine.state(name) == "PREEMPTED" and before[name] == "RUNNING" for name in names)
            assert preempted > 2
            assert [engine.answers[name].tokens for name in names] == expected
            engine.settle()
    chunks = set(puts.chunks)
    puts.chunks.clear()
    assert chunks
    # The same, by an engine that has room for everything.
    with Engine(llama, connector_of(shared_cluster, **tenant)) as engine:
        for one, right in zip(prompts, expected, strict=True):
            assert engine.ask(one, tokens=tokens)[0].tokens == right
            engine.settle()
        keys = sorted(key for _, key, _ in chunks)
        end = time.monotonic() + 60
        # A busy machine may answer too late once, and what is not saved then is saved when it is computed again.
        while not set(keys) <= {key for _, key, _ in puts.chunks}:
            assert time.monotonic() < end
            engine.forget()
            engine.ask(*prompts, tokens=tokens)
            engine.settle()
    (namespace,) = {namespace for namespace, _, _ in puts.chunks}
    with shared_cluster.client() as client:
        saved = client.get(next(iter(chunks))[0], keys)
        right = client.get(namespace, keys)
        for index in range(len(keys)):
            one, other = saved[index], right[index]
            assert one is not None
            assert other is not None
            # Not to the bit: how many tokens are computed at once rounds differently.
            np.testing.assert_allclose(
                np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), rtol=1e-3, atol=1e-3
            )
