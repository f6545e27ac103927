# SPDX-License-Identifier: Apache-2.0
"""An engine of vLLM in this process, made to be stepped and looked into."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_testing.environment import prepare

prepare()
pytest.importorskip("vllm", reason="no vLLM is installed: `make test-vllm_engine` tries to, and says why not")

from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.engine.llm_engine import LLMEngine

from moonpool.connector.pool import PoolLink

if TYPE_CHECKING:
    from typing_extensions import Self

    from moonpool.cluster import LocalCluster

__all__ = ["Answer", "Engine", "connector_of"]

#: Far more than any of these requests takes: a request that waits for ever ends the test.
DEADLINE = 60.0


def connector_of(cluster: LocalCluster, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a connector to a pool on this host."""
    return {
        "kv_connector": "MoonpoolConnector",
        "kv_connector_module_path": "moonpool.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            # One batch of tests should not wait for what a busy machine does in between.
            "lookup_timeout": 10.0,
            "chunk_tokens": 64,
            "staging_bytes": 8 << 20,
            "prefetch_bytes": 16 << 20,
            "store_client": {"master": cluster.master, **cluster.client_options},
            **settings,
        },
    }


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        tokens: those that were generated so far.
        cached: how many tokens of the prompt were not computed.
        finished: why it ended; None: it has not, or was aborted.
        params: for the engine that goes on with it.
    """

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finished: str | None = None
    params: dict[str, Any] | None = None


def links(connector: Any) -> list[PoolLink]:
    """Return the ways of a connector to its pool."""
    if hasattr(connector, "_connectors"):  # MultiConnector
        return [link for one in connector._connectors for link in links(one)]
    side = connector._scheduler or connector._worker
    return [side._link if connector._scheduler else side._parts.link]


class Engine:
    """An engine that runs when it is stepped.

    Args:
        model: its folder.
        connector: of `connector_of`; None: no connector.
        connected: wait until the connector has found its pool, which an engine does not.
        blocks: of its cache.
        options: more of vLLM's engine arguments.

    Attributes:
        answers: by the name of the request.
    """

    def __init__(
        self,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        *,
        connected: bool = True,
        blocks: int = 200,
        **options: Any,
    ) -> None:
        block_size = options.get("block_size", 32)
        arguments: dict[str, Any] = {
            "dtype": "float32",
            "block_size": block_size,
            # One block is vLLM's own, and the longest request has to fit.
            "max_model_len": min(1024, (blocks - 1) * block_size),
            "max_num_batched_tokens": 1024,
            **options,
        }
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        try:
            self.engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(model),
                    skip_tokenizer_init=True,
                    enforce_eager=True,
                    seed=0,
                    num_gpu_blocks_override=blocks,
                    disable_log_stats=True,
                    **arguments,
                )
            )
        except BaseException:
            # What vLLM has made by then would be in the way of the next engine of this process.
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            raise
        self.answers: dict[str, Answer] = {}
        self._ids: dict[str, str] = {}
        self._count = 0
        self._counts: Counter[str] = Counter()
        if connector is not None:
            self._listen_to_counts()
            if connected:
                self.run(self._is_connected)

    @property
    def core(self) -> Any:
        """The core of the engine: its busy loop is `step` here."""
        return self.engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The scheduler of vLLM."""
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The worker's side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def free_blocks(self) -> int:
        """How many blocks of the cache nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _is_connected(self) -> bool:
        # A worker in another process cannot be looked into, nor does it answer before it has found the pool.
        if not hasattr(self.engine.engine_core, "engine_core"):
            return True
        return all(link.client is not None for link in links(self.connector) + links(self.worker_connector))

    @property
    def has_work(self) -> bool:
        """Whether there is something to do in a step."""
        if hasattr(self.engine.engine_core, "engine_core"):
            return bool(self.scheduler.has_requests())
        return bool(self.engine.has_unfinished_requests())

    def counts(self) -> Counter[str]:
        """Return what both sides of the connector have counted since the last time."""
        for side in (self.connector, self.worker_connector):
            side.get_kv_connector_stats()
        counts, self._counts = self._counts, Counter()
        return counts

    def _listen_to_counts(self) -> None:
        if not hasattr(self.engine.engine_core, "engine_core") or hasattr(self.connector, "_connectors"):
            return

        def listen(real: Callable[[], Any]) -> Any:
            stats = real()
            if stats is not None:
                self._counts.update({name: value for name, value in stats.data.items() if isinstance(value, int)})
            return stats

        for side in (self.connector, self.worker_connector):
            side.get_kv_connector_stats = functools.partial(listen, side.get_kv_connector_stats)

    def add(
        self,
        prompt: Iterable[int],
        tokens: int = 8,
        *,
        name: str | None = None,
        salt: str | None = None,
        params: Mapping[str, Any] | None = None,
        lora: Any = None,
    ) -> str:
        """Add a request that generates so many tokens, and return its name.

        Args:
            prompt: its tokens.
            tokens: how many it generates.
            name: of the request.
            salt: of its hashes.
            params: `kv_transfer_params`.
            lora: its adapter, a `LoRARequest`.
        """
        self._count += 1
        name = name or f"request-{self._count}"
        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            request["cache_salt"] = salt
        self.answers[name] = Answer()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": dict(params)}
        self._ids[name] = self.engine.add_request(name, request, sampling, lora_request=lora)
        return name

    def abort(self, name: str) -> None:
        """End a request early."""
        self.engine.abort_request([name])

    def state(self, name: str) -> str | None:
        """Return the scheduler's word for what a request is doing; None: it is gone."""
        request = self.scheduler.requests.get(self._ids[name])
        return None if request is None else request.status.name

    def step(self) -> None:
        """Make one step, and take what came of it."""
        before = time.monotonic()
        outputs = self.engine.step()
        for output in outputs:
            answer = self.answers[output.request_id]
            answer.tokens = list(output.outputs[0].token_ids)
            answer.cached = output.num_cached_tokens or 0
            answer.finished = output.outputs[0].finish_reason
            answer.params = output.kv_transfer_params
        if not outputs and time.monotonic() - before < 1e-3:
            # As the core's own loop does when a step had nothing to compute.
            time.sleep(1e-3)

    def run(self, until: Callable[[], bool] | None = None, seconds: float = DEADLINE) -> None:
        """Step until it is so; without `until`, until every request has ended."""
        end = time.monotonic() + seconds
        while not until() if until is not None else self.engine.has_unfinished_requests():
            if time.monotonic() > end:
                states = {name: self.state(name) for name in self._ids}
                raise TimeoutError(f"still not so after {seconds} seconds: {states}")
            self.step()

    def ask(
        self,
        *prompts: Iterable[int],
        tokens: int = 8,
        salt: str | None = None,
        params: Sequence[Mapping[str, Any] | None] | None = None,
        lora: Any = None,
    ) -> list[Answer]:
        """Run requests to their end, all at the same time; each with `kv_transfer_params` of its own, or none."""
        each = zip(prompts, params or [None] * len(prompts), strict=True)
        names = [self.add(prompt, tokens, salt=salt, params=its, lora=lora) for prompt, its in each]
        self.run(lambda: all(self.answers[name].finished for name in names))
        return [self.answers[name] for name in names]

    def forget(self, *, connector: bool = False) -> bool:
        """Drop the engine's own prefix cache, so that what is reused comes from the pool."""
        return bool(self.engine.reset_prefix_cache(reset_connector=connector))

    def settle(self, seconds: float = DEADLINE) -> None:
        """Step until the connector holds no block any more: every save has ended."""
        total = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # One is vLLM's own null block.
        self.run(lambda: not self.engine.has_unfinished_requests() and self.free_blocks == total, seconds)

    def close(self) -> None:
        """End it, so that the next one can be made in this process."""
        self.engine.engine_core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
