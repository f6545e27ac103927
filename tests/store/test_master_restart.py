# SPDX-License-Identifier: Apache-2.0
"""The master is killed and started again: what was committed is there, and clients and nodes go on by themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from engine_testing.leaks import eventually
from store_testing import content, key, keys, say

from moonpool.cluster import local_cluster
from moonpool.proto.errors import SessionUnknownError
from moonpool.store_client import MasterUnavailableError, session


def test_every_hit_is_back_after_a_kill(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"lease_max": "1s"}  # nothing is put in where a lease of before may run
    with (
        local_cluster(nodes=2, dram="64MiB", store="sqlite", master_options=options) as cluster,
        cluster.client() as client,
    ):
        hashes = keys(500)
        values = [content(hash_, 4096) for hash_ in hashes]
        client.put("a", hashes, values, replicas=2).require()
        boot = client.stats()["master"]["boot_id"]
        begin = time.monotonic()
        cluster.restart_master()
        assert eventually(lambda: bool(client.exists("a", hashes).all()), 60)
        took = time.monotonic() - begin
        assert list(client.get("a", hashes)) == values
        stats = client.stats()["master"]
        assert stats["boot_id"] != boot
        assert stats["restarts_seen"] >= 1
        client.put("a", keys(50, "new"), [b"n" * 4096] * 50, timeout=60).require()
        assert list(client.get("a", keys(50, "new"))) == [b"n" * 4096] * 50
        assert client.exists("a", hashes).all()
        say(capsys, f"all hits are back {took:.2f} s after the kill of the master")


def test_a_put_waits_for_a_master_that_comes_back() -> None:
    options = {"lease_max": "1s"}
    with (
        local_cluster(nodes=1, dram="16MiB", store="sqlite", master_options=options) as cluster,
        cluster.client(timeout=60.0) as client,
    ):
        client.put("a", [key(0)], [b"x" * 100]).require()
        cluster.kill_master()
        waiting = client.put_async("a", keys(5, "w"), [content(hash_, 1000) for hash_ in keys(5, "w")])
        reading = client.get_async("a", [key(0)])
        assert not waiting.done()
        cluster.start_master()
        waiting.result(60).require()
        assert reading.result(60) is not None
        assert list(client.get("a", keys(5, "w"))) == [content(hash_, 1000) for hash_ in keys(5, "w")]


def test_without_a_master_calls_end_in_time() -> None:
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client() as client:
        cluster.kill_master()
        for call in (
            lambda: client.get("a", [key(0)], timeout=0.3),
            lambda: client.put("a", [key(0)], [b"x"], timeout=0.3),
            lambda: client.exists("a", [key(0)], timeout=0.3),
        ):
            begin = time.monotonic()
            with pytest.raises(MasterUnavailableError) as caught:
                call()
            assert caught.value.retryable
            assert time.monotonic() - begin < 30
        assert not client.stats()["master"]["session_open"]


def test_a_master_that_remembers_nothing_gets_new_memory() -> None:
    with local_cluster(nodes=2, dram="16MiB", store="memory") as cluster, cluster.client() as client:
        client.put("a", [key(0)], [b"x" * 100], replicas=2).require()
        cluster.restart_master()
        # The nodes lend memory of a new incarnation: writers of the old one can do no harm there.
        client.put("a", [key(1)], [b"y" * 100], timeout=60).require()
        assert client.get("a", [key(1)])[0] == b"y" * 100
        assert not client.exists("a", [key(0)])[0]
        assert eventually(lambda: len(client.segments()) == 2, 60)
        found = client.get("a", [key(0)])
        assert found[0] is None


def test_a_call_opens_the_session_that_a_new_master_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    # By itself it would come back too late.
    monkeypatch.setattr(session, "_BACKOFF_FIRST", 120.0)
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client() as client:
        client.put("a", [key(0)], [b"x" * 100]).require()
        cluster.restart_master()
        client.put("a", [key(1)], [b"x" * 100], timeout=60).require()
        with client.pin("a", [key(1)]) as pin:
            assert len(pin) == 1
        assert client.stats()["master"]["sessions_opened"] == 2


def test_a_session_that_stays_unknown_is_a_master_that_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client() as client:

        def unknown(*_: Any) -> None:
            raise SessionUnknownError("the session is not known", retryable=True)

        monkeypatch.setattr(client._core.link, "call", unknown)
        for call in (
            lambda: client.put("a", [key(2)], [b"x"], timeout=0.1),
            lambda: client.pin("a", [key(1)], timeout=0.1),
        ):
            with pytest.raises(MasterUnavailableError, match=r"the session .* was not open again") as caught:
                call()
            assert caught.value.retryable
