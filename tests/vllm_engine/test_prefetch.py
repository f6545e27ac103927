# SPDX-License-Identifier: Apache-2.0
"""A request whose KV comes into host memory first has no blocks, is in nobody's way, and can go at any time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_testing.engines import Engine, connector_of
from vllm_testing.gates import Gate
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64
Plain = Callable[..., list[int]]


@pytest.mark.parametrize("aborted", [False, True])
def test_no_block_is_held_while_chunks_come(
    llama: Path,
    shared_cluster: LocalCluster,
    plain: Plain,
    tenant: dict[str, Any],
    aborted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector = connector_of(shared_cluster, load_mode="prefetch", load_timeout=60.0, **tenant)
    long, other = prompt(4 * CHUNK + 5, "fetched", aborted), prompt(50, "other", aborted)
    with Engine(llama, connector) as engine:
        engine.ask(long)
        engine.settle()
        engine.forget()
        free = engine.free_blocks
        gate = Gate(monkeypatch, "get_into")
        buffer = engine.worker_connector._worker._parts.prefetches
        with gate.shut():
            name = engine.add(long)
            engine.run(gate.arrived.is_set)
            assert engine.ask(other)[0].tokens == plain(other)
            engine.run(lambda: engine.free_blocks == free)
            assert engine.state(name) == "WAITING"
            assert buffer.used == 4
            if aborted:
                engine.abort(name)
                engine.step()
                assert buffer.used == 4  # bytes may come yet
        engine.run()
        if not aborted:
            assert engine.answers[name].tokens == plain(long)
            assert engine.answers[name].cached == 4 * CHUNK
        engine.run(lambda: buffer.used == 0)
        engine.settle()
        # What was fetched is still there.
        engine.forget()
        calls = gate.calls
        answer = engine.ask(long)[0]
        assert (answer.tokens, answer.cached, gate.calls) == (plain(long), 4 * CHUNK, calls)
        engine.settle()
