# SPDX-License-Identifier: Apache-2.0
"""An engine of vLLM's scheduler, this connector's scheduler side, and workers that move the names of contents.

Where a model would have keys and values of a token, a cell holds a number that stands for all tokens up to it. So
whatever a request is computed from can be checked: a cell that is not loaded, overwritten too early or of another
request has another number.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from connector_testing import configs
from moonpool.connector.metadata import FetchJob, LendJob, Lent, LoadJob, MoonpoolWorkerMetadata, SaveJob
from moonpool.errors import MoonpoolError

SALT = "salt"


class Pool:
    """What a store client would find, and how it fails."""

    def __init__(self) -> None:
        self.roster: tuple[bytes, ...] = ()
        self.chunks: dict[bytes, list[int]] = {}
        self.failing = False
        self.closed = False
        self.asked = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def match_prefix(self, namespace: str, hashes: bytes, *, lease: float, timeout: float) -> int:
        assert len(hashes) % 32 == 0
        assert lease > 0
        self.asked += 1
        in_time = self.go_on.wait(timeout)
        if self.failing or not in_time:
            raise MoonpoolError("the master did not answer", retryable=True)
        found = 0
        while hashes[32 * found : 32 * (found + 1)] in self.chunks:
            found += 1
        return found

    def close(self) -> None:
        self.closed = True


class Rig:
    """Steps the scheduler. What workers do, and when, is in the hands of the test.

    Attributes:
        loads: of async loads that have not ended.
        saves: those that have not ended.
        load_seconds: what the workers say that a load has taken.
        trouble: whether they say that it was late or failed.
        fetches: those that have not ended.
        fetched: chunks that fetches have brought to the workers.
        params: what requests that have ended are to be gone on with.
        lender: from which blocks are read that are lent; None: they are all looked for in the pool.
        lent: what is in the table of leases, by slot.
        holding: what other engines lend to this one, by token.
        renewing: what other engines still need of this one, as the workers hear it at the next step.
        returning: what they need no more.
        pool: with the contents of chunks.
    """

    def __init__(self, config: Any, pool: Pool, *, workers: int = 1) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.config = config
        self.pool = pool
        self.workers = workers
        self.block_tokens: int = config.cache_config.block_size
        self.ahead = 1 if config.scheduler_config.async_scheduling else 0
        self.in_flight: list[tuple[Any, Any]] = []
        self.scheduler = (AsyncScheduler if self.ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=configs.cache_config(config),
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.block_tokens,
            log_stats=True,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(self.block_tokens, hash_fn)
        self.connector: Any = self.scheduler.connector
        self.blocks: Any = self.scheduler.kv_cache_manager.block_pool
        self.free_at_first = self.blocks.get_num_free_blocks()
        self.cells: dict[tuple[int, int], int] = {}
        self.loads: dict[str, LoadJob] = {}
        self.saves: dict[int, SaveJob] = {}
        self.load_seconds = 0.01
        self.trouble = False
        self.fetches: dict[int, FetchJob] = {}
        self.fetched: dict[int, dict[bytes, list[int]]] = {}
        self.contents: dict[bytes, list[int]] = {}
        self.requests: dict[str, Any] = {}
        self.params: dict[str, Any] = {}
        self.lent: dict[int, LendJob] = {}
        self.holding: dict[bytes, Lent] = {}
        self.renewing: set[bytes] = set()
        self.returning: set[bytes] = set()
        self.lender: Rig | None = None
        self.sync_good: Callable[[LoadJob], int] = lambda job: len(job.hashes) // 32
        self.counts: Counter[str] = Counter()
        self._stats = self.connector.get_kv_connector_stats
        self.connector.get_kv_connector_stats = self._count
        self._said = MoonpoolWorkerMetadata()
        self._recving: set[str] = set()
        self._failed: set[int] = set()
        self._requests = 0
        self.wait_for_pool()

    def _count(self) -> Any:
        stats = self._stats()
        if stats is not None:
            self.counts.update(stats.data)
        return stats

    # ---------------------------------------------------------------- requests

    def add(self, tokens: list[int], *, outputs: int = 8, **options: Any) -> str:
        """Add a request, and return its name."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._requests += 1
        name = f"r{self._requests}"
        params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True, **options.pop("sampling", {}))
        params.update_from_generation_config({}, 2)
        request = Request(name, list(tokens), params, None, block_hasher=self.hasher, **options)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, **options: bool) -> bool:
        """Empty vLLM's own cache, and with it the connector's (`reset_connector`)."""
        self._learn()  # keys may be others after that
        done: bool = self.scheduler.reset_prefix_cache(**options)
        return done

    # ---------------------------------------------------------------- workers

    def end_load(self, name: str, good: int | None = None) -> None:
        """End an async load with so many good chunks (None: all)."""
        job = self.loads.pop(name)
        self._load(job, len(job.hashes) // 32 if good is None else good)
        self._recving.add(name)

    def end_save(self, job_id: int, *, saved: bool = True) -> None:
        """End a save. What is saved is what lies in its blocks now."""
        job = self.saves.pop(job_id)
        self._learn()
        self._said.ended_saves[job_id] = self.workers
        per_chunk = len(job.block_ids) // (len(job.hashes) // 32)
        for index in range(len(job.hashes) // 32):
            key = job.hashes[32 * index : 32 * (index + 1)]
            blocks = job.block_ids[index * per_chunk : (index + 1) * per_chunk]
            there = [self.cells.get((block, at), 0) for block in blocks for at in range(self.block_tokens)]
            assert there == self.contents[key], "a block that is saved has changed, or was never computed"
            if saved:
                self.pool.chunks[key] = there
        if not saved:
            self._said.unsaved.add(job_id)

    def end_fetch(self, fetch_id: int, good: int | None = None) -> None:
        """End a fetch with so many chunks (None: all that the pool has)."""
        job = self.fetches.pop(fetch_id)
        keys = [job.hashes[at : at + 32] for at in range(0, len(job.hashes), 32)]
        there = next((number for number, key in enumerate(keys) if key not in self.pool.chunks), len(keys))
        good = there if good is None else min(good, there)
        self.fetched[fetch_id] = {key: self.pool.chunks[key] for key in keys[:good]}
        self._said.fetched[fetch_id] = self.workers, good
        self._said.times[fetch_id] = good, self.load_seconds, self.trouble

    def _load(self, job: LoadJob, good: int) -> None:
        if job.lent is not None and self.lender is not None:
            if self._borrow(job.lent, job):
                return
            good = len(job.hashes) // 32 if good else 0
        per_chunk = self.connector._scheduler._settings.chunk_tokens // self.block_tokens
        at, chunks = 0, self.fetched.pop(job.fetch_id) if job.fetch_id else self.pool.chunks
        for index in range(len(job.hashes) // 32):
            key = job.hashes[32 * index : 32 * (index + 1)]
            begin = job.begin_block if index == 0 else 0
            chunk = chunks.get(key)
            assert chunk is not None or not job.fetch_id, "a load of what was not fetched"
            good = good if chunk is not None or index >= good else index
            for block in range(begin, per_chunk):
                if at == len(job.block_ids):
                    break
                block_id, at = job.block_ids[at], at + 1
                if index >= good:
                    self._failed.add(block_id)
                    continue
                assert chunk is not None
                for token in range(self.block_tokens):
                    self.cells[block_id, token] = chunk[block * self.block_tokens + token]
        assert at == len(job.block_ids), "a load has more blocks than its chunks"
        self._said.loaded[job.request_id] = good
        if not job.fetch_id:
            self._said.times[job.request_id] = good, self.load_seconds, self.trouble

    def _borrow(self, lent: Lent, job: LoadJob) -> bool:
        """Read blocks of another rig, if they are lent still."""
        assert self.lender is not None
        its = self.lender.lent.get(lent.slot)
        if its is None or (its.token, its.digest) != (lent.token, lent.digest):
            return False
        for here, there in zip(job.block_ids, lent.block_ids, strict=True):
            for token in range(self.block_tokens):
                self.cells[here, token] = self.lender.cells[there, token]
        self._said.loaded[job.request_id] = len(job.hashes) // 32
        return True

    # ---------------------------------------------------------------- steps

    def step(self, drafts: random.Random | None = None) -> None:
        """Schedule, compute and update once."""
        for request in self.scheduler.running:
            if drafts is not None and not request.is_prefill_chunk:
                request.spec_token_ids = [
                    drafts.randrange(500) for _ in range(drafts.randint(0, self.scheduler.num_spec_tokens))
                ]
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.execute(output, drafts)))
        while len(self.in_flight) > self.ahead:
            outputs = self.scheduler.update_from_output(*self.in_flight.pop(0))
            ended = [one for some in outputs.values() for one in some.outputs if one.kv_transfer_params is not None]
            self.params.update({one.request_id: one.kv_transfer_params for one in ended})

    def execute(self, output: Any, drafts: random.Random | None = None) -> Any:
        """Do what a worker would do in this step, and return what it would."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        meta = output.kv_connector_metadata
        self._check_owned(meta)
        sync = [job for job in meta.loads if not job.is_async]
        assert bool(sync) == output.has_sync_kv_loads
        for job in sync:
            self._load(job, self.sync_good(job))
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(name, output, drafts) for name in names]
        self.loads.update({job.request_id: job for job in meta.loads if job.is_async})
        self.saves.update({job.job_id: job for job in meta.saves})
        for fetch_id in meta.dropped:
            assert self.fetches.pop(fetch_id, None) or self.fetched.pop(fetch_id, None) is not None
        self.fetches.update({job.fetch_id: job for job in meta.fetches})
        self._lend(meta)
        said, self._said = self._said, MoonpoolWorkerMetadata()
        recving, self._recving = self._recving, set()
        failed, self._failed = self._failed, set()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=recving, invalid_block_ids=failed, kv_connector_worker_meta=said
            ),
        )

    def _lend(self, meta: Any) -> None:
        self.lent.update({job.slot: job for job in meta.lending})
        for slot in meta.wiping:
            del self.lent[slot]
            self._said.wiped[slot] = self.workers
        self.holding.update({lent.token: lent for lent in meta.holding})
        for token in meta.returning:
            del self.holding[token]
        self._said.renewed, self._said.returned = self.renewing, self.returning
        self.renewing, self.returning = set(), set()

    def _contents(self, request: Any, tokens: list[int]) -> list[int]:
        """Return what the cells of these tokens have to hold."""
        one = hash((request.cache_salt, request.lora_request and request.lora_request.name))
        numbers = []
        for token in tokens:
            one = hash((one, token))
            numbers.append(one)
        return numbers

    def _learn(self) -> None:
        """Note what the chunks of all requests have to hold."""
        side = self.connector._scheduler
        size = side._settings.chunk_tokens
        for request in self.requests.values():
            numbers = self._contents(request, list(request.all_token_ids))
            for chunk, key in enumerate(side._keys.some(request, 0, side._keys.count(request))):
                self.contents[key] = numbers[chunk * size : (chunk + 1) * size]
            blocks, per_chunk = request.num_prompt_tokens // self.block_tokens, size // self.block_tokens
            if blocks % per_chunk:
                begin = blocks // per_chunk * size
                self.contents[side._keys.of_blocks(request, blocks)] = numbers[begin : blocks * self.block_tokens]

    def _compute(self, name: str, output: Any, drafts: random.Random | None) -> list[int]:
        request = self.scheduler.requests[name]
        ids = self.block_ids(name)
        drafted = output.scheduled_spec_decode_tokens.get(name, [])
        end = request.num_computed_tokens
        begin = end - output.num_scheduled_tokens[name]
        tokens = list(request.all_token_ids)
        while len(tokens) < end - len(drafted):  # sampled by steps whose output vLLM has not taken yet
            tokens.append(_sampled(self._contents(request, tokens)))
        wanted = self._contents(request, tokens + drafted)
        for at in range(begin):
            if self.cells.get((ids[at // self.block_tokens], at % self.block_tokens)) != wanted[at]:
                # Of a sync load that has failed in this step, vLLM drops what the step computes.
                assert self._failed.intersection(ids), f"{name}: wrong bytes at token {at} of {begin}"
                break
        for at in range(begin, end):
            self.cells[ids[at // self.block_tokens], at % self.block_tokens] = wanted[at]
        if end < request.num_tokens:
            return []
        accepted = drafts.randint(0, len(drafted)) if drafts and drafted else 0
        return [*drafted[:accepted], _sampled(wanted[: end - len(drafted) + accepted])]

    def block_ids(self, name: str) -> list[int]:
        """Return the blocks of a request, as they are now."""
        ids: list[int] = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        return ids

    # ---------------------------------------------------------------- checks

    def _check_owned(self, meta: Any) -> None:
        for job in meta.loads:
            own = self.block_ids(job.request_id)
            assert set(job.block_ids) <= set(own), "a load into blocks of somebody else"
            for block_id in job.block_ids if job.is_async else ():
                assert self.blocks.blocks[block_id].ref_cnt == 1, "a load into a block that others use"
        for job in meta.saves:
            for block_id in job.block_ids:
                assert self.blocks.blocks[block_id].ref_cnt >= 1, "a save of a block that may be used again"

    def check_end(self, steps: int = 400) -> None:
        """Everything ends, whatever happened: requests, loads and saves; no block is missing."""
        self.pool.go_on.set()
        for _ in range(steps):
            if not self.scheduler.has_requests():
                break
            for name in list(self.loads):
                self.end_load(name)
            for job_id in list(self.saves):
                self.end_save(job_id)
            for fetch_id in list(self.fetches):
                self.end_fetch(fetch_id)
            self.step()
            if not self.scheduler.running:
                time.sleep(0.001)  # as the engine does when it has computed nothing
        assert not self.scheduler.has_requests(), "requests that never end"
        for _ in range(2):  # what runs ahead
            self.step()
        side = self.connector._scheduler
        assert self.blocks.get_num_free_blocks() == self.free_at_first, "blocks that are never free again"
        assert side._saves.pinned_blocks == 0
        assert not side._tracked
        assert not self.loads
        assert not self.fetches, "fetches for nobody"
        assert not self.fetched, "chunks in host memory for nobody"
        assert not side._loads.fetches._open
        assert not side._leases.pending
        assert not self.lent, "blocks that are lent to nobody"
        assert not self.holding, "what is needed of other engines by nobody"
        assert not self.saves

    def wait_for_pool(self) -> None:
        deadline = time.monotonic() + 10
        while self.connector._scheduler._link.client is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait_for_lookups(self) -> None:
        """Wait until every look-up has its answer."""
        deadline = time.monotonic() + 10
        tracked = self.connector._scheduler._tracked.values()
        while any(one.lookup is not None and one.lookup.answer is None for one in tracked):
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def close(self) -> None:
        self.scheduler.shutdown()
        assert self.pool.closed


def _sampled(contents: list[int]) -> int:
    return contents[-1] % 500


@contextlib.contextmanager
def rig(extra: dict[str, Any] | None = None, *, pool: Pool | None = None, **options: Any) -> Iterator[Rig]:
    """Make a rig with a pool of its own, chunks of two blocks, and no bounds that a test does not set."""
    pool = pool or Pool()
    settings = {"chunk_tokens": 2 * configs.BLOCK, "saving_blocks_max": 1.0, "lookup_timeout": 30.0, **(extra or {})}
    with mock.patch.object(importlib.import_module("moonpool.connector.scheduler"), "_client", return_value=pool):
        made = Rig(configs.vllm_config(settings, **options), pool)
        try:
            yield made
        finally:
            made.close()
