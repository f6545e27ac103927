# SPDX-License-Identifier: Apache-2.0
"""Answers that are lost, and requests that are carried out late: what is asked for happens once, and in its order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from etcd_testing import SECONDS, put, read, slots
from master_testing import eventually

from moonpool.master.errors import StoreLostError, StoreUnavailableError
from moonpool.master.store import EtcdOptions, EtcdStore, SegmentRow
from moonpool.master.store.etcd.calls import Members, RefusedError, UnansweredError

Open = Callable[[EtcdOptions], EtcdStore]
Attempt = Callable[[Members, str, Any], Any]


class Unreliable:
    """Stands between a store and etcd: of what is asked for, some is not carried out, or late, or not answered."""

    def __init__(self, attempt: Attempt, seed: int, part: float) -> None:
        self._attempt = attempt
        self._chance = random.Random(seed)
        self._part = part
        self._late: list[Any] = []
        self.made = 0

    async def attempt(self, members: Members, method: str, request: Any) -> Any:
        if method != "Txn" or self._chance.random() >= self._part:
            reply = await self._attempt(members, method, request)
            await self._catch_up(members)
            return reply
        self.made += 1
        what = self._chance.choice(("not carried out", "not answered", "late"))
        if what == "not answered":
            await self._attempt(members, method, request)
        elif what == "late":
            self._late.append(request)
        raise UnansweredError(what)

    async def _catch_up(self, members: Members) -> None:
        """What was late comes now: after whatever has been carried out meanwhile, also after its store was closed."""
        if self._late and self._chance.random() < 0.15:
            with contextlib.suppress(RefusedError):  # its lease may be over
                await self._attempt(members, "Txn", self._late.pop(0))


@pytest.fixture
def unreliable(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], Unreliable]:
    def make(seed: int, part: float) -> Unreliable:
        network = Unreliable(Members.attempt, seed, part)

        async def attempt(members: Members, method: str, request: Any) -> Any:
            return await network.attempt(members, method, request)

        monkeypatch.setattr(Members, "attempt", attempt)
        return network

    return make


def row(segment: int) -> SegmentRow:
    return SegmentRow(segment, "node", "host", "127.0.0.1:1", "pool", bytes(16), 1 << 30)


@pytest.mark.parametrize("seed", range(3))
def test_changes_happen_once_and_in_order(
    etcd_options: Callable[..., EtcdOptions], opened: Open, unreliable: Callable[[int, float], Unreliable], seed: int
) -> None:
    options = etcd_options()
    store = opened(options)
    network = unreliable(seed, 0.3)
    chance = random.Random(seed)
    expected: dict[int, bytes] = {}
    segments: set[int] = set()
    changes = []
    for turn in range(120):
        some = chance.sample(range(60), chance.choice((1, 3, 20)))
        if chance.random() < 0.3:
            changes.append(store.apply(b"", b"", slots(*some)))
            expected = {slot: text for slot, text in expected.items() if slot not in some}
        else:
            content = {slot: b"%d of %d" % (slot, turn) for slot in some}
            changes.append(put(store, content))
            expected.update(content)
        if chance.random() < 0.05:
            number = store.new_segment()
            changes.append(store.put_segment(row(number)))
            segments.add(number)
        if chance.random() < 0.05 and segments:
            number = segments.pop()
            changes.append(store.remove_segment(number))
        if chance.random() < 0.1:
            changes[-1].result(SECONDS)
    for change in changes:
        change.result(SECONDS)
    assert network.made > 5
    assert read(store) == expected
    store.close()
    # Nothing that was late has come through after all.
    again = opened(options)
    assert read(again) == expected
    assert [one.segment for one in again.segments()] == sorted(segments)


def test_what_was_late_finds_the_mark_moved(
    etcd_options: Callable[..., EtcdOptions], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one case in which a plain second attempt goes wrong: a first attempt that is carried out after the second."""
    store = opened(etcd_options())
    attempt = Members.attempt
    held: list[tuple[Members, Any]] = []

    async def hold_first(members: Members, method: str, request: Any) -> Any:
        if method == "Txn" and not held:
            held.append((members, request))
            raise UnansweredError("held")
        return await attempt(members, method, request)

    monkeypatch.setattr(Members, "attempt", hold_first)
    put(store, {1: b"first"}).result(SECONDS)
    put(store, {1: b"second"}).result(SECONDS)
    members, request = held[0]
    late = asyncio.run_coroutine_threadsafe(attempt(members, "Txn", request), store._loop).result(SECONDS)
    assert not late.succeeded
    assert read(store) == {1: b"second"}


@pytest.mark.parametrize("carried_out", [True, False])
def test_what_is_refused_for_want_of_space_is_looked_for(
    etcd_options: Callable[..., EtcdOptions], opened: Open, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    """Where there is no space etcd says so also of the change that took the last of it, which is there then."""
    store = opened(etcd_options())
    before = dict.fromkeys(range(3), b"before")
    put(store, before).result(SECONDS)
    attempt = Members.attempt
    refused: list[str] = []

    async def refuse(members: Members, method: str, request: Any) -> Any:
        if method != "Txn":
            return await attempt(members, method, request)
        if carried_out:
            await attempt(members, method, request)
        refused.append(method)
        raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")

    monkeypatch.setattr(Members, "attempt", refuse)
    changes = [put(store, {1: b"after", 7: b"new"}), store.apply(b"", b"", slots(2))]
    errors = [change.exception(SECONDS) for change in changes]
    monkeypatch.undo()
    assert len(refused) == 2
    if carried_out:
        assert errors == [None, None]
        assert read(store) == {0: b"before", 1: b"after", 7: b"new"}
    else:
        assert all(isinstance(error, StoreUnavailableError) for error in errors)
        assert not any(isinstance(error, StoreLostError) for error in errors)
        assert read(store) == before


def test_without_answers_what_was_not_sent_is_refused_and_what_was_sent_is_not_known(
    etcd_options: Callable[..., EtcdOptions], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.master.store.etcd.writing._PATIENCE", 0.3)
    store = opened(dataclasses.replace(etcd_options(), closing=1.0))

    async def nothing(members: Members, method: str, request: Any) -> Any:
        raise UnansweredError("nothing")

    with monkeypatch.context() as patched:
        patched.setattr(Members, "attempt", nothing)
        sent = put(store, {1: b"sent"})
        eventually(lambda: store._writing is not None and store._writing._busy, "an attempt")
        waiting = put(store, {1: b"waits for it"})
        error = waiting.exception(SECONDS)
        assert isinstance(error, StoreUnavailableError)
        assert not isinstance(error, StoreLostError)
        assert error.retryable
        assert not sent.done(), "nobody knows yet"
    sent.result(SECONDS)
    assert read(store) == {1: b"sent"}

    monkeypatch.setattr(Members, "attempt", nothing)
    sent = put(store, {1: b"sent again"})
    eventually(lambda: store._writing is not None and store._writing._busy, "an attempt")
    store.close()
    assert isinstance(sent.exception(0), StoreLostError)
