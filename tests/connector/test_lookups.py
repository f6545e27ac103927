# SPDX-License-Identifier: Apache-2.0
"""Look-ups on their thread, and the way to a pool that may be there or not. Without vLLM."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.connector.adapters import Adapters
from moonpool.connector.keys import Keys, Known
from moonpool.connector.lookups import Lookup, Lookups
from moonpool.connector.pool import PoolLink
from moonpool.errors import MoonpoolError
from moonpool.store_client import ROOT, StoreClient

if TYPE_CHECKING:
    from typing_extensions import Self

KEYS = [hashlib.sha256(bytes([index])).digest() for index in range(8)]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=1, dram="64MiB") as its:
        yield its


class Asked:
    """A link and look-ups, closed at the end."""

    def __init__(self, make: Any, **options: Any) -> None:
        self.link = PoolLink(make, options.get("retry", 0.05))
        self.lookups = Lookups(
            self.link, "model", **{"lease": 5.0, "timeout": 1.0, "most": 8, "retry": 0.05, **options}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lookups.close()
        self.link.close()

    def wait_for_pool(self) -> None:
        _until(lambda: self.link.client is not None)

    def ask(self, keys: list[bytes]) -> Lookup:
        lookup = self.lookups.ask(b"".join(keys))
        _until(lambda: lookup.answer is not None)
        return lookup


def _until(true: Any) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_says_how_much_of_a_chain_there_is(cluster: LocalCluster) -> None:
    with cluster.client() as writer, Asked(cluster.client) as asked:
        asked.wait_for_pool()
        assert asked.ask(KEYS).answer == 0
        writer.put("model", KEYS[:5], [b"kv"] * 5, parents=ROOT).require()
        lookup = asked.ask(KEYS)
        assert (lookup.answer, lookup.problem) == (5, "")
        assert 1.0 < lookup.until - time.monotonic() < 5.0
        assert asked.ask(KEYS[5:]).answer == 0


def test_all_shards_have_to_be_there(cluster: LocalCluster) -> None:
    with cluster.client() as writer, Asked(cluster.client) as asked:
        asked.wait_for_pool()
        writer.put("model", KEYS[:2], [b"kv"] * 2, parents=ROOT, shard=0, shards=2).require()
        assert asked.ask(KEYS).answer == 0
        writer.put("model", KEYS[:1], [b"kv"], parents=ROOT, shard=1, shards=2).require()
        assert asked.ask(KEYS).answer == 1


def test_what_is_found_stays_for_the_lease(cluster: LocalCluster) -> None:
    with cluster.client() as writer, Asked(cluster.client) as asked:
        asked.wait_for_pool()
        writer.put("model", KEYS[:1], [bytes(1 << 20)], parents=ROOT).require()
        asked.ask(KEYS)
        # More than there is room for: everything without a lease goes.
        for index in range(100):
            writer.put("other", [hashlib.sha256(b"%d" % index).digest()], [bytes(1 << 20)])
        assert asked.ask(KEYS).answer == 1


def test_a_pool_that_is_not_there_is_answered_at_once_and_found_when_it_comes(cluster: LocalCluster) -> None:
    there = threading.Event()

    def make() -> StoreClient:
        if not there.is_set():
            raise MoonpoolError("no master")
        return cluster.client()

    with Asked(make) as asked:
        lookup = asked.lookups.ask(KEYS[0])
        assert (lookup.answer, lookup.problem) == (0, "away")
        assert lookup.until > time.monotonic() - 1.0
        there.set()
        asked.wait_for_pool()
        assert asked.ask(KEYS).problem == ""


def test_a_master_that_has_gone_fails_one_and_the_next_are_answered_at_once(cluster: LocalCluster) -> None:
    with Asked(cluster.client, timeout=0.3, retry=60.0) as asked:
        asked.wait_for_pool()
        assert asked.ask(KEYS).problem == ""
        cluster.kill_master()
        assert asked.ask(KEYS).problem == "failed"
        assert asked.lookups.ask(KEYS[0]).problem == "away"


def test_too_many_are_refused_and_who_has_gone_is_passed_over() -> None:
    go_on = threading.Event()
    seen = []

    class Slow:
        def match_prefix(self, namespace: str, hashes: bytes, **_: Any) -> int:
            seen.append(hashes)
            assert go_on.wait(30)
            return 1

        def close(self) -> None:
            pass

    with Asked(Slow, most=2) as asked:
        asked.wait_for_pool()
        first = asked.lookups.ask(KEYS[0])
        _until(lambda: seen)
        waiting = [asked.lookups.ask(key) for key in KEYS[1:3]]
        refused = asked.lookups.ask(KEYS[3])
        assert (refused.answer, refused.problem) == (0, "full")
        assert asked.lookups.waiting == 2
        waiting[0].abandoned = True
        go_on.set()
        _until(lambda: waiting[1].answer == 1)
        assert first.answer == 1
        assert seen == [KEYS[0], KEYS[2]]


def test_a_fault_of_ours_ends_one_lookup_and_not_all(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty:
        def match_prefix(self, namespace: str, hashes: bytes, **_: Any) -> int:
            if hashes == KEYS[0]:
                raise RuntimeError("a bug")
            return 1

        def close(self) -> None:
            pass

    with Asked(Faulty) as asked:
        asked.wait_for_pool()
        assert asked.ask(KEYS[:1]).problem == "failed"
        assert "a bug" in caplog.text
        assert asked.ask(KEYS[1:2]).answer == 1


def test_closing_does_not_ask_what_waits() -> None:
    asked_for = []

    class Counting:
        def match_prefix(self, namespace: str, hashes: bytes, **_: Any) -> int:
            asked_for.append(hashes)
            time.sleep(0.01)
            return 1

        def close(self) -> None:
            pass

    with Asked(Counting, most=1000) as asked:
        asked.wait_for_pool()
        for _ in range(1000):
            asked.lookups.ask(KEYS[0])
    assert len(asked_for) < 1000
    assert not any(thread.name == "moonpool-lookups" for thread in threading.enumerate())


# ---------------------------------------------------------------- keys


class Request:
    lora_request = None

    def __init__(self, count: int) -> None:
        self.block_hashes = [hashlib.sha256(b"block %d" % index).digest() for index in range(count)]


def test_the_key_of_a_chunk_is_the_hash_of_its_last_block() -> None:
    keys, request = Keys(4, Adapters()), Request(11)
    assert keys.count(request) == 2
    assert keys.some(request, 0, 2) == [request.block_hashes[3], request.block_hashes[7]]
    assert keys.some(request, 1, 2) == [request.block_hashes[7]]
    assert keys.some(request, 2, 2) == []
    assert keys.parent(request, 0) == ROOT
    assert keys.parent(request, 1) == request.block_hashes[3]


def test_other_keys_are_a_chain_of_their_own() -> None:
    keys, request = Keys(2, Adapters()), Request(8)
    before = keys.some(request, 0, 4)
    keys.renew()
    after = keys.some(request, 0, 4)
    assert not set(before) & set(after)
    assert after == keys.some(request, 0, 4)
    assert {len(key) for key in after} == {32}
    assert keys.parent(request, 1) == after[0]
    keys.renew()
    assert not set(after) & set(keys.some(request, 0, 4))


def test_what_is_known_is_bounded_and_the_oldest_is_forgotten() -> None:
    known = Known(3)
    for key in KEYS[:3]:
        assert not known.saving(key)
    assert known.saving(KEYS[0])
    known.saving(KEYS[3])
    assert len(known) == 3
    assert known.learned(KEYS[1]) is None
    assert known.learned(KEYS[0]) == float("inf")
    known.saved(KEYS[0], 5.0)
    known.saved(KEYS[1], 5.0)
    assert (known.learned(KEYS[0]), known.learned(KEYS[1])) == (5.0, None)
    known.lost(KEYS[0])
    assert known.learned(KEYS[0]) is None
