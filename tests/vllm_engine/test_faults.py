# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the pool: the engine goes on, with the right tokens (cases V1, V2, V7, V8)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_testing import locate, spoil
from vllm_testing.engines import Engine, connector_of
from vllm_testing.gates import Gate, Puts
from vllm_testing.prompts import prompt

from moonpool.cluster import LocalCluster
from moonpool.connector.buffer import Buffer
from moonpool.store_client import getting, packing

CHUNK = 64
Plain = Callable[..., list[int]]
#: Short, so that what is gone is given up soon.
TIMES = {"lookup_timeout": 1.0, "load_timeout": 2.0, "save_timeout": 2.0, "retry": 0.1}


@pytest.fixture(params=["sync", "layerwise", "async", "prefetch"])
def load_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(engine: Engine, plain: Plain, *prompts: list[int]) -> list[int]:
    """Return how many tokens were not computed; the others have to be right."""
    answers = engine.ask(*prompts)
    assert [answer.tokens for answer in answers] == [plain(one) for one in prompts]
    assert [answer.finished for answer in answers] == ["length"] * len(prompts)
    return [answer.cached for answer in answers]


def found(engine: Engine, plain: Plain, one: list[int]) -> bool:
    """Ask once more; return whether the pool had every whole chunk. The engine itself would have a block more."""
    engine.forget()
    return ask(engine, plain, one) == [len(one) // CHUNK * CHUNK]


def fill(engine: Engine, plain: Plain, one: list[int]) -> None:
    """Ask until the pool has it, however slow everything is, and leave it nowhere else."""
    engine.run(lambda: found(engine, plain, one))
    prefetches = engine.worker_connector._worker._parts.prefetches
    if prefetches is not None:
        prefetches._buffer = Buffer(8)
    engine.settle()
    assert engine.forget()


def test_without_a_pool_everything_is_computed_until_there_is_one(
    llama: Path, cluster: LocalCluster, plain: Plain, load_mode: str
) -> None:
    same = prompt(300, "away")
    cluster.kill_master()
    with Engine(llama, connector_of(cluster, load_mode=load_mode, **TIMES), connected=False) as engine:
        assert ask(engine, plain, same) == [0]
        engine.settle()
        engine.forget()
        cluster.start_master()
        fill(engine, plain, same)


@pytest.mark.parametrize("fault", ["kill master", "stop master", "kill node", "stop node"])
@pytest.mark.parametrize("when", ["between", "looking up", "loading", "saving"])
def test_a_part_of_the_pool_goes_away(
    llama: Path,
    cluster: LocalCluster,
    plain: Plain,
    fault: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, new, more = (prompt(300, name) for name in ("there", "new", "more"))
    begin: dict[str, Callable[[], None]] = {
        "kill master": cluster.kill_master,
        "stop master": lambda: cluster.signal_master(0, signal.SIGSTOP),
        "kill node": lambda: cluster.kill_node(0),
        "stop node": lambda: cluster.signal_node(0, signal.SIGSTOP),
    }
    method = {"between": None, "looking up": "match_prefix", "loading": "get_into", "saving": "put"}[when]
    connector = connector_of(cluster, **TIMES)
    with Engine(llama, connector) as engine:
        fill(engine, plain, there)
        if method is None:
            begin[fault]()
        else:
            gate = Gate(monkeypatch, method)
            with gate.shut():
                names = [engine.add(there), engine.add(new)]
                engine.run(gate.arrived.is_set)
                begin[fault]()
            engine.run(lambda: all(engine.answers[name].finished for name in names))
            assert [engine.answers[name].tokens for name in names] == [plain(there), plain(new)]
        ask(engine, plain, there, more)
        engine.settle()
        engine.forget()
        # And when it is back.
        if fault == "kill master":
            cluster.start_master()
        elif fault == "kill node":
            cluster.start_node(0)
        else:
            cluster.signal_master(0, signal.SIGCONT)
            cluster.signal_node(0, signal.SIGCONT)
        fill(engine, plain, more)


def test_a_chunk_that_was_evicted_after_it_was_found_is_computed(
    llama: Path, cluster: LocalCluster, plain: Plain, load_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = Puts(monkeypatch)
    same = prompt(5 * CHUNK + 35, "evicted")
    with Engine(llama, connector_of(cluster, load_mode=load_mode)) as engine, cluster.client() as client:
        fill(engine, plain, same)
        gets = Gate(monkeypatch, "get_into")
        ((namespace, _, _), *_) = puts.chunks
        keys = [key for _, key, _ in puts.chunks]
        # The look-up has been answered from what is gone when its load begins: the third chunk and what hangs on it.
        real = engine.connector.get_num_new_matched_tokens

        def removed(request: Any, local: int) -> Any:
            found = real(request, local)
            if found[0]:
                key = bytes(request.block_hashes[3 * CHUNK // 32 - 1])
                assert key in keys
                client.remove(namespace, [key])
            return found

        engine.connector.get_num_new_matched_tokens = removed
        ask(engine, plain, same)
        assert gets.calls >= 1
        engine.settle()


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_spoilt_chunk_is_a_miss_and_would_have_changed_the_tokens(
    llama: Path,
    cluster: LocalCluster,
    plain: Plain,
    checked: bool,
    load_mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    puts = Puts(monkeypatch)
    same = prompt(4 * CHUNK + 35, "spoilt")
    connector = connector_of(cluster, load_mode=load_mode)
    with Engine(llama, connector) as engine, cluster.client() as client:
        fill(engine, plain, same)
        chunks = sorted(puts.chunks)
        assert len(chunks) == 4
        for extents in locate(client, chunks[0][0], [key for _, key, _ in chunks]):
            # The sign of many numbers, of keys and of values.
            spoil(client, extents[0], packing.HEADER_BYTES, b"\x00\x00\x00\x80" * 50_000)
        if checked:
            # How many tokens were cached vLLM counts before a load fails that a step waits for, and not again.
            assert ask(engine, plain, same) == ([0] if load_mode in ("async", "prefetch") else [4 * CHUNK])
            assert "CHUNK_CORRUPT" in caplog.text
        else:
            # That the test sees it: a store client that believes every byte makes other tokens.
            monkeypatch.setattr(getting, "headers_match", same_but_digests)
            monkeypatch.setattr(getting, "proved", lambda words, place, rows, *_: np.ones(len(rows), np.bool_))
            answer = engine.ask(same)[0]
            assert answer.cached == 4 * CHUNK
            assert answer.tokens != plain(same)
        engine.settle()


def same_but_digests(found: Any, wanted: Any) -> Any:
    """Stand in for the comparison of headers, digests left out."""
    words = [word for word in range(found.shape[1]) if word != packing.DIGEST_WORD]
    return (found[:, words] == wanted[:, words]).all(axis=1)
