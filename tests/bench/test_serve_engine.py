# SPDX-License-Identifier: Apache-2.0
"""Engines that ``mooncake-bench serve`` starts itself, here with a stand-in for vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_testing import Terminal

from moonpool.bench.errors import ExitStatus
from moonpool.bench.serve import engines
from moonpool.bench.serve.engines import Engines

Bench = Callable[..., subprocess.CompletedProcess[str]]

#: As much of vLLM and prometheus_client as the process of an engine uses. A connector called Bad does not start, one
#: called Deaf never ends, and a prompt that begins with 103 fails.
STAND_IN = {
    "prometheus_client.py": """
queried = 0
def generate_latest():
    return f"vllm:prefix_cache_queries_total {queried}\\nvllm:prefix_cache_hits_total 0\\n".encode()
""",
    "vllm/__init__.py": """
from dataclasses import dataclass
from typing import Any
@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    output_kind: Any
""",
    "vllm/sampling_params.py": """
import enum
class RequestOutputKind(enum.Enum):
    DELTA = 1
""",
    "vllm/config.py": """
class KVTransferConfig:
    def __init__(self, kv_connector, kv_role):
        self.name = kv_connector
""",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
class AsyncEngineArgs:
    def __init__(self, model, kv_transfer_config, block_size):
        self.connector = kv_transfer_config and kv_transfer_config.name
        assert (model, block_size) == ("the-model", 32)
""",
    "vllm/v1/__init__.py": "",
    "vllm/v1/engine/__init__.py": "",
    "vllm/v1/engine/async_llm.py": """
import os, signal, subprocess, sys, time
from types import SimpleNamespace as Of
import prometheus_client
class AsyncLLM:
    @classmethod
    def from_engine_args(cls, args):
        self = cls()
        print("this engine is", args.connector, flush=True)
        if args.connector == "Bad":
            raise RuntimeError("no such connector")
        self.connector = args.connector
        # As the engine's core: outlives whoever is killed.
        self.core = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        with open(os.environ["STAND_IN_PIDS"], "a") as file:
            print(os.getpid(), self.core.pid, file=file)
        self.model_config = Of(get_vocab_size=lambda: 110)
        return self
    async def generate(self, prompt, parameters, request_id):
        ids = prompt["prompt_token_ids"]
        prometheus_client.queried += len(ids)
        if ids[0] == 103:
            raise ValueError("no prompts with 103")
        for number in range(parameters.max_tokens):
            last = number + 1 == parameters.max_tokens
            output = Of(token_ids=[number + 200], finish_reason="length" if last else None)
            yield Of(outputs=[output], prompt_token_ids=ids, num_cached_tokens=len(ids) // 2)
    def shutdown(self):
        if self.connector == "Deaf":
            signal.pause()
        self.core.kill()
        self.core.wait()
""",
}
SMALL = [
    *("--users", "4", "--turns", "2", "--turn-tokens", "20", "--output-tokens", "5", "--warmup", "0", "--seed", "7"),
    *("--rounds", "2", "--model", "the-model", "--engine-args", '{"block_size": 32}', "--json", "-"),
]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    for name, text in STAND_IN.items():
        file = tmp_path / "stand_in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "stand_in"), os.environ.get("PYTHONPATH", "")]),
        "STAND_IN_PIDS": str(tmp_path / "pids"),
    }


def connector(name: str) -> str:
    return json.dumps({"kv_connector": name, "kv_role": "kv_both"})


def all_gone(environ: dict[str, str], engines: int) -> bool:
    """Return whether there were so many engines with their cores, when all have ended."""
    pids = Path(environ["STAND_IN_PIDS"]).read_text().split()
    for pid in pids:
        wait_until_gone(int(pid))
    return len(pids) == 2 * engines


def test_engines_are_asked_as_servers_are(bench: Bench, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(connector("Pool"))
    arguments = ["--engine", f"pool=@{tmp_path / 'config.json'}", "--engine", "none"]
    result = bench("serve", "multi-turn", *arguments, *SMALL, "--vocab", "102", environ=environ)
    assert result.returncode == ExitStatus.OK, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["environment"]["parameters"]["engines"] == {"pool": "Pool", "none": None}
    for name, part in zip(("pool", "none"), document["variants"], strict=True):
        assert (part["name"], part["model"], part["requests"], part["failed"]) == (name, "the-model", 16, 0)
        assert (part["output_tokens"], part["prompt_tokens"]) == (80, 8 * 20 + 8 * 45)
        assert part["cached_tokens"] == 8 * 10 + 8 * 22
        assert part["queried_tokens"] == part["prompt_tokens"]
        assert part["stand_ins"] == 0
    assert all_gone(environ, 2)


def test_what_an_engine_raises_is_a_failure_of_its_request(bench: Bench, environ: dict[str, str]) -> None:
    # The model knows 110 tokens, so that a tenth of the prompts begin with the one that it does not like.
    result = bench(
        *("serve", "multi-turn", "--engine", "none", *SMALL, "--users", "100", "--turns", "1"), environ=environ
    )
    assert result.returncode == ExitStatus.FAILED, result.stderr
    (part,) = json.loads(result.stdout)["variants"]
    assert set(part["failures"]) == {"server"}
    assert part["requests"] + part["failed"] == 200
    assert 1 <= part["failed"] <= 60
    assert "ValueError: no prompts with 103" in result.stderr


def test_an_engine_that_does_not_start_says_why_and_the_others_are_ended(
    bench: Bench, environ: dict[str, str], tmp_path: Path
) -> None:
    environ = {**environ, "TMPDIR": str(tmp_path)}
    arguments = ["--engine", "none", "--engine", f"bad={connector('Bad')}"]
    result = bench("serve", "multi-turn", *arguments, *SMALL, environ=environ)
    assert result.returncode == ExitStatus.FAILED
    assert "engine bad ended" in result.stderr
    assert "RuntimeError: no such connector" in result.stderr
    kept = re.search(r"look into (\S+\.log)", result.stderr)
    assert kept is not None
    assert Path(kept[1]).parent == tmp_path
    assert "this engine is Bad" in Path(kept[1]).read_text()
    assert all_gone(environ, 1)


def test_an_engine_that_is_too_slow_is_given_up(bench: Bench, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "stand_in" / "vllm" / "config.py").write_text("import signal\nsignal.pause()\n")
    arguments = ["--engine", "none", "--start-timeout", "500ms"]
    result = bench("serve", "multi-turn", *arguments, *SMALL, environ={**environ, "TMPDIR": str(tmp_path)})
    assert result.returncode == ExitStatus.FAILED
    assert "engine none is not there after 500ms" in result.stderr


def test_an_engine_that_does_not_end_is_ended(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_STOP_S", 0.5)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with Engines("the-model", {"block_size": 32}, 60.0, lambda text: None) as started:
        places = started.start({"deaf": json.loads(connector("Deaf"))})
        socket = places["deaf"].socket
        assert socket is not None
        assert Path(socket).is_socket()
    assert all_gone(environ, 1)
    assert not Path(socket).parent.exists()


def test_engines_end_with_the_benchmark(environ: dict[str, str], tmp_path: Path) -> None:
    # Nobody is left who could remove its folder.
    environ = {**environ, "TMPDIR": str(tmp_path)}
    # Its processes are in a session of their own, so nothing but the kernel tells the engine.
    terminal = Terminal("serve", "multi-turn", "--engine", "none", *SMALL, "--rounds", "1000", environ=environ)
    terminal.wait_for("round 2 of 1000")
    engine, core = map(int, Path(environ["STAND_IN_PIDS"]).read_text().split())
    terminal.send(signal.SIGKILL)
    terminal.ended()
    wait_until_gone(engine)
    # A core of vLLM notices that its parent is gone; this one does not.
    os.kill(core, signal.SIGKILL)


def wait_until_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        waited = os.pidfd_open(pid)
        assert select.select([waited], [], [], 60)[0]
        os.close(waited)
