# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""Blocks that a prefill engine keeps for a decode engine: until it has them, wants them no more, or says nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing.rig import Pool, Rig, rig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from moonpool.connector.metadata import MoonpoolWorkerMetadata, PeerPlace
from moonpool.errors import MoonpoolError

pytestmark = THEIR_WARNINGS

BLOCK = 16
CHUNK = 64
PROMPT = [index * 7 % 500 + 3 for index in range(300)]
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
PEERS = (("10.0.0.1:7000", "ab" * 16),)
EXTRA = {"chunk_tokens": CHUNK, "peer_lease": 60.0}


def sampling(params: Any) -> dict[str, Any]:
    return {"sampling": {"extra_args": {"kv_transfer_params": params}}}


@contextlib.contextmanager
def two(pool: Pool | None = None, **extra: Any) -> Iterator[tuple[Rig, Rig]]:
    """A prefill rig whose blocks can be read, and a decode rig that reads them. Their pool has nothing."""
    with rig({**EXTRA, **extra}, pool=pool, role="kv_producer") as first:
        first.connector._scheduler.take_peers(PEERS)
        with rig({**EXTRA, "handover_wait": 0.01, **extra}, pool=pool, role="kv_consumer") as second:
            second.lender = first
            yield first, second


def prefill(made: Rig, tokens: list[int]) -> Any:
    name = made.add(tokens, outputs=1, **sampling(WANTED))
    while name not in made.params:
        made.wait_for_lookups()
        made.step()
    made.step()
    return made.params[name]


def settle(made: Rig) -> None:
    """Let everything end but for what is lent."""
    for job_id in list(made.saves):
        made.end_save(job_id)
    for _ in range(3):
        made.step()


def given_back(first: Rig, params: Any) -> None:
    first.returning = {bytes.fromhex(params["moonpool_lease"]["token"])}


@pytest.mark.parametrize("length", [16, 17, 40, 63, 64, 65, 80, 100, 128, 200])
def test_a_prompt_comes_straight_from_the_other_engine(length: int) -> None:
    with two() as (first, second):
        params = prefill(first, PROMPT[:length])
        settle(first)
        held = first.free_at_first - first.blocks.get_num_free_blocks()
        assert held == length // BLOCK == len(params["remote_block_ids"][0])
        name = second.add(PROMPT[:length], outputs=4, **sampling(params))
        second.step()
        wanted = (length - 1) // BLOCK
        assert [len(job.block_ids) for job in second.loads.values()] == ([wanted] if wanted else [])
        assert not second.pool.asked
        token = bytes.fromhex(params["moonpool_lease"]["token"])
        if wanted:
            assert token in second.holding
            second.end_load(name)
            second.step()
            second.step()
        assert token not in second.holding
        given_back(first, params)
        for made in (second, first):
            made.check_end()
        assert first.counts["leases_returned"] == first.counts["leases_granted"] == 1


def test_what_this_engine_has_itself_is_not_read() -> None:
    with two() as (first, second):
        second.add(PROMPT[:40], outputs=1)
        second.check_end()
        params = prefill(first, PROMPT[:100])
        name = second.add(PROMPT[:100], outputs=4, **sampling(params))
        second.step()
        job = second.loads[name]
        assert job.begin_block == 2
        assert job.lent.block_ids == params["remote_block_ids"][0][2:6]
        second.check_end()
        given_back(first, params)
        first.check_end()


def test_what_nobody_renews_is_free_again() -> None:
    with two(peer_lease=0.3) as (first, second):
        params = prefill(first, PROMPT[:100])
        token = bytes.fromhex(params["moonpool_lease"]["token"])
        settle(first)
        end = time.monotonic() + 0.9
        while time.monotonic() < end:
            first.renewing = {token}
            first.step()
            time.sleep(0.01)
        assert first.blocks.get_num_free_blocks() == first.free_at_first - 6
        assert first.connector.has_pending_push_work()
        while first.connector.has_pending_push_work():
            assert time.monotonic() < end + 10
            first.step()
        assert not first.lent
        first.check_end()
        assert first.counts["leases_expired"] == 1
        # Too late: it is computed, since the pool has nothing.
        second.add(PROMPT[:100], outputs=4, **sampling(params))
        second.check_end()


def test_blocks_are_kept_until_every_worker_has_wiped_the_slot() -> None:
    with two() as (first, _):
        leases = first.connector._scheduler._leases
        leases._workers = first.workers = 2
        params = prefill(first, PROMPT[:100])
        settle(first)
        (slot,) = first.lent
        given_back(first, params)
        first.workers = 1
        for _ in range(3):
            first.step()
        assert not first.lent
        assert first.blocks.get_num_free_blocks() == first.free_at_first - 6
        leases.wiped({slot: 1})
        assert first.blocks.get_num_free_blocks() == first.free_at_first
        first.check_end()


@pytest.mark.parametrize("state", ["waiting", "loading", "loaded"])
def test_a_request_that_is_aborted_gives_back_what_is_kept_for_it(state: str) -> None:
    with two() as (first, second):
        params = prefill(first, PROMPT[:100])
        token = bytes.fromhex(params["moonpool_lease"]["token"])
        name = second.add(PROMPT[:100], outputs=40, **sampling(params))
        if state != "waiting":
            second.step()
            assert token in second.holding
        if state == "loaded":
            second.end_load(name)
            second.step()
            second.step()
        second.abort(name)
        if state == "loading":
            second.step()
            # Somebody still writes to its blocks, and reads those of the other engine.
            assert token in second.holding
            second.end_load(name)
        while second.scheduler.has_requests():
            second.step()
        assert token not in second.holding
        second.check_end()
        given_back(first, params)
        first.check_end()


def test_a_load_that_fails_is_looked_for_in_the_pool_and_then_computed() -> None:
    pool = Pool()
    with two(pool) as (first, second):
        params = prefill(first, PROMPT[:100])
        given_back(first, params)
        first.check_end()
        assert len(pool.chunks) == 2
        del pool.chunks[next(iter(pool.chunks))]
        name = second.add(PROMPT[:100], outputs=40, **sampling(params))
        second.step()
        second.end_load(name)
        second.check_end()
        assert second.counts["hits"] == 1


def test_no_more_is_lent_than_may_be_kept() -> None:
    with two(peer_blocks_max=8 / 64) as (first, _):
        params = [prefill(first, PROMPT[at : at + 100]) for at in (0, 50)]
        assert ["moonpool_lease" in one for one in params] == [True, False]
        assert params[1]["remote_num_tokens"] == 96
        given_back(first, params[0])
        first.check_end()
        assert first.counts["leases_refused"] == 1


def test_without_a_pool_it_is_handed_over_all_the_same() -> None:
    pool = Pool()
    with two(pool, retry=60.0) as (first, second):
        first.connector._scheduler._link.failed(MoonpoolError("it is away"))
        params = prefill(first, PROMPT[:100])
        assert not first.saves
        assert params["remote_num_tokens"] == 96
        name = second.add(PROMPT[:100], outputs=4, **sampling(params))
        second.step()
        assert len(second.loads[name].block_ids) == 6
        second.check_end()
        given_back(first, params)
        first.check_end()


def test_an_engine_that_is_not_to_read_asks_the_pool() -> None:
    pool = Pool()
    with two(pool, peer_reads=False) as (first, second):
        params = prefill(first, PROMPT[:100])
        settle(first)
        name = second.add(PROMPT[:100], outputs=4, **sampling(params))
        second.wait_for_lookups()
        second.step()
        assert second.loads[name].lent is None
        assert not second.holding
        second.check_end()
        given_back(first, params)
        first.check_end()


def test_a_reset_ends_what_is_lent() -> None:
    with two() as (first, _):
        prefill(first, PROMPT[:100])
        settle(first)
        first.reset(reset_connector=True)
        first.step()
        assert not first.lent
        first.check_end()


@pytest.mark.parametrize(
    "change",
    [
        {"moonpool_lease": None},
        {"moonpool_lease": {}},
        {"moonpool_lease": {"peers": 3, "slot": 0, "token": "", "seconds": 1}},
        {"moonpool_lease": {"peers": [["a:1", "b"]], "slot": "x", "token": "00" * 16, "seconds": 1}},
        {"moonpool_lease": {"peers": [["a:1", "b"]], "slot": 0, "token": "zz", "seconds": 1}},
        {"moonpool_lease": {"peers": [["a:1", "b"]], "slot": 0, "token": "00" * 16, "seconds": "nan"}},
        {"moonpool_lease": {"peers": [["a:1", "b"]], "slot": 0, "token": "00" * 15, "seconds": 1}},
        {"remote_block_ids": None},
        {"remote_block_ids": []},
        {"remote_block_ids": [[1, 2]]},
        {"remote_block_ids": [[1, 2, 3, 4, 5, 1 << 63]]},
        {"remote_block_ids": ["abcdef"]},
    ],
)
def test_leases_that_somebody_made_up_are_none(change: dict[str, Any]) -> None:
    with two() as (first, second):
        params = prefill(first, PROMPT[:100])
        name = second.add(PROMPT[:100], outputs=4, **sampling({**params, **change}))
        assert second.connector._scheduler._tracked[name].handed.lent is None
        second.check_end()
        given_back(first, params)
        first.check_end()


def test_a_request_that_is_preempted_does_not_read_again() -> None:
    pool = Pool()
    with two(pool) as (first, second):
        params = prefill(first, PROMPT[:100])
        name = second.add(PROMPT[:100], outputs=40, **sampling(params))
        second.step()
        second.end_load(name)
        for _ in range(5):
            second.step()
        second.scheduler.reset_prefix_cache(reset_running_requests=True)
        for _ in range(50):
            second.wait_for_lookups()
            second.step()
            for job in second.loads.values():
                assert job.lent is None
            for loading in list(second.loads):
                second.end_load(loading)
        second.check_end()
        given_back(first, params)
        first.check_end()


def test_workers_are_reached_in_the_order_of_their_shards() -> None:
    with rig(EXTRA) as made:
        places = {(0, 1): (1, "b"), (0, 0): (0, "a"), (1, 0): (2, "c"), (1, 1): (2, "d")}
        made.connector.set_xfer_handshake_metadata_pp_aware(
            {rank: PeerPlace(f"{host}:1", "ab" * 16, shard) for rank, (shard, host) in places.items()}
        )
        # Of two workers with the same bytes one is enough.
        peers = made.connector._scheduler._leases.peers
        assert [address for address, _ in peers] == ["a:1", "b:1", "c:1"]
        # What another connector beside this one has said.
        made.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})
        assert made.connector._scheduler._leases.peers == ()


def test_what_workers_say_of_leases_is_added() -> None:
    one = MoonpoolWorkerMetadata(wiped={1: 1, 2: 1}, renewed={b"a"})
    both = one.aggregate(MoonpoolWorkerMetadata(wiped={2: 1}, renewed={b"b"}, returned={b"c"}))
    assert (both.wiped, both.renewed, both.returned) == ({1: 1, 2: 2}, {b"a", b"b"}, {b"c"})
