# SPDX-License-Identifier: Apache-2.0
"""A request that is aborted, whatever it is doing, leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm_testing.engines import Engine, connector_of
from vllm_testing.gates import Gate
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster

CHUNK = 64
Plain = Callable[..., list[int]]


@pytest.mark.parametrize(
    "state", ["new", "looked up", "found", "loading", "loaded", "prefilling", "decoding", "saving", "preempted"]
)
def test_a_request_is_aborted(
    llama: Path,
    shared_cluster: LocalCluster,
    plain: Plain,
    tenant: dict[str, Any],
    state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, other = prompt(4 * CHUNK + 9, "there"), prompt(2 * CHUNK + 9, "other")
    looks = Gate(monkeypatch, "match_prefix")
    gets = Gate(monkeypatch, "get_into")
    puts = Gate(monkeypatch, "put")
    connector = connector_of(shared_cluster, load_mode="async", **tenant)
    with Engine(llama, connector, blocks=24, max_num_batched_tokens=128) as engine:
        engine.ask(there)
        engine.settle()
        engine.forget()
        with ExitStack() as shut:
            if state in ("new", "looked up"):
                shut.enter_context(looks.shut())
            if state in ("found", "loading"):
                shut.enter_context(gets.shut())
            if state == "saving":
                shut.enter_context(puts.shut())
            first = there if state in ("looked up", "found", "loading", "loaded") else prompt(4 * CHUNK + 9, state)
            name = engine.add(first, 2 * CHUNK)
            if state == "looked up":
                engine.run(looks.arrived.is_set)
            elif state == "found":
                engine.run(lambda: engine.state(name) == "WAITING_FOR_REMOTE_KVS")
            elif state == "loading":
                engine.run(gets.arrived.is_set)
            elif state == "loaded":
                engine.run(lambda: engine.state(name) == "RUNNING")
            elif state == "prefilling":
                engine.run(lambda: engine.state(name) == "RUNNING")
                assert not engine.answers[name].tokens
            elif state == "decoding":
                engine.run(lambda: len(engine.answers[name].tokens) > 3)
            elif state == "saving":
                engine.run(lambda: len(engine.answers[name].tokens) > 3 and puts.arrived.is_set())
            elif state == "preempted":
                more = [engine.add(prompt(4 * CHUNK, state, index), 2 * CHUNK) for index in range(2)]
                engine.run(lambda: "PREEMPTED" in [engine.state(one) for one in [name, *more]])
                (name, *_) = [one for one in [name, *more] if engine.state(one) == "PREEMPTED"]
            engine.abort(name)
            # Others go on while it ends.
            second = engine.add(other)
            engine.run(lambda: engine.answers[second].finished is not None)
        assert engine.answers[second].tokens == plain(other)
        engine.settle()
        assert engine.state(name) is None
        assert engine.forget()
        assert engine.ask(there)[0].tokens == plain(there)
        engine.settle()


def test_an_engine_is_closed_while_it_loads_and_saves(
    llama: Path, shared_cluster: LocalCluster, tenant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, new = prompt(4 * CHUNK, "there"), prompt(4 * CHUNK, "new")
    gets, puts = Gate(monkeypatch, "get_into", seconds=0.2), Gate(monkeypatch, "put", seconds=0.2)
    connector = connector_of(shared_cluster, load_mode="async", **tenant)
    with Engine(llama, connector) as engine:
        engine.ask(there)
        engine.settle()
        engine.forget()
        gets.arrived.clear()
        puts.arrived.clear()
        engine.add(there, CHUNK)
        engine.add(new, CHUNK)
        engine.run(lambda: gets.arrived.is_set() and puts.arrived.is_set())
