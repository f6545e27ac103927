# SPDX-License-Identifier: Apache-2.0
"""`make soak` of the pool, short; and that it would notice what must not be."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path

import pytest
from engine_testing.leaks import eventually
from store_testing import key
from store_testing.workload import LATE, NAMESPACE, Workload

from moonpool.cluster import local_cluster
from pool_chaos.soak import GROWTH_MAX, ROUNDS_TO_JUDGE, grown, soak
from pool_chaos.verdict import USAGE_MAX, gauges_of, too_much, usage_of

SECONDS = 20.0


def test_nothing_breaks_the_pool(pool_seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    happened = soak(SECONDS, pool_seed, said.append, clients=3)
    with capsys.disabled():
        print(f"\nseed {pool_seed}: {said}; {dict(sorted(happened.seen.items()))}")  # noqa: T201 - figures
    assert not happened.wrong, f"seed {pool_seed}\n" + "\n".join(happened.wrong)
    assert happened.seen["get OK"] > 100
    assert happened.seen["put OK"] > 100
    assert sum(happened.faults.values()) > 5


def test_wrong_bytes_and_late_calls_would_be_noticed() -> None:
    """A pool in which somebody puts other bytes, and a clock on which everything takes long."""
    ticks = iter(range(0, 10**9, int(LATE) + 100))
    with local_cluster(nodes=1, dram="16MiB") as cluster:
        with cluster.client() as client:
            client.put(NAMESPACE, [key(number) for number in range(400)], [b"\0" * 100] * 400).require()
        work = Workload(cluster.master, cluster.secret, 1, (5.0,), lambda: next(ticks))
        over = threading.Event()
        thread = threading.Thread(target=work.run, args=(over,))
        thread.start()
        try:
            eventually(lambda: _told(work, "!=") and _told(work, "took"))
        finally:
            over.set()
            thread.join()
    assert _told(work, "!=")
    assert _told(work, "took")


def _told(work: Workload, what: str) -> bool:
    return any(what in wrong for wrong in list(work.wrong))


def test_what_stays_would_be_noticed() -> None:
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client() as client:
        assert not any(gauges_of(client.master_stats()).values())
        client.put("ns", [key("one")], [b"one"]).require()
        with client.pin("ns", [key("one")]):
            gauges = gauges_of(client.master_stats())
        assert {what for what, value in gauges.items() if value} == {
            "chunks", "used_bytes", "bytes in segments", "pinned", "pins"
        }  # fmt: skip


@pytest.mark.parametrize("what", GROWTH_MAX)
def test_what_keeps_growing_is_named(what: str) -> None:
    held = usage_of(os.getpid())
    rounds = [{"client 0": copy.copy(held)} for _ in range(2 * ROUNDS_TO_JUDGE)]
    assert grown(rounds) == []
    for number, one in enumerate(rounds):
        one["client 0"][what] += number * (GROWTH_MAX[what] // 4 + 1)
    assert [text.split()[0] for text in grown(rounds)] == [what]


def test_a_process_that_holds_too_much_is_named() -> None:
    held = {name: dict.fromkeys(("rss_bytes", "threads", "sockets"), 1) for name in ("node 0", "master 1")}
    assert too_much(held) == []
    held["node 0"]["threads"] = USAGE_MAX["node"]["threads"] + 1
    (told,) = too_much(held)
    assert told.startswith("node 0 has")
    assert "threads" in told


def test_usage_is_that_of_the_process(tmp_path: Path) -> None:
    before = usage_of(os.getpid())
    with (tmp_path / "file").open("wb"):
        assert usage_of(os.getpid())["descriptors"] == before["descriptors"] + 1
    assert before["rss_bytes"] > 1 << 20
    assert before["threads"] >= 1


def test_a_client_that_cannot_be_opened_is_no_end() -> None:
    """Nobody is there: that is counted, and the workload goes on."""
    work = Workload("127.0.0.1:1", "secret", 1, (0.2,))
    over = threading.Event()
    thread = threading.Thread(target=work.run, args=(over,))
    thread.start()
    assert eventually(lambda: bool(work.seen["open raised MasterUnavailableError"]))
    over.set()
    thread.join()
    assert not work.wrong
