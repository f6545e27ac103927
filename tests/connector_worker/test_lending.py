# SPDX-License-Identifier: Apache-2.0
"""Blocks that one worker reads straight from the cache of another: the right bytes, or an error."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from store_testing import keys
from worker_testing import Cache
from worker_testing.rig import Rig

from moonpool.connector.borrowing import Borrowing, LeaseLostError
from moonpool.connector.jobs import LendJob, Lent
from moonpool.connector.layout import CacheLayoutError
from moonpool.connector.lease_plan import digest_of
from moonpool.connector.lending import Lending
from moonpool.errors import MoonpoolError
from moonpool.transfer_engine import ClosedError, DeadlineError

BLOCKS = 4
SECONDS = 30.0
Rigs = Callable[..., Rig]


class Lender:
    """A worker that lends, and the last lease."""

    def __init__(self, rig: Rig, namespace: str) -> None:
        self.rig = rig
        self.lending = Lending(rig.engine, rig.paged, namespace)

    def lend(self, block_ids: list[int], *, slot: int = 3, key: bytes = b"k" * 32, seconds: float = SECONDS) -> Lent:
        token, digest = os.urandom(16), digest_of(key, block_ids)
        self.lending.lend([LendJob(slot, token, digest)])
        engine = self.rig.engine
        assert engine.address is not None
        return Lent(((engine.address, engine.incarnation),), slot, token, digest, block_ids, seconds)

    def hears(self) -> tuple[set[bytes], set[bytes]]:
        """Return what comes next."""
        end = time.monotonic() + SECONDS
        while not any(heard := self.lending.heard()):
            assert time.monotonic() < end
            time.sleep(0.002)
        return heard


Make = Callable[..., tuple[Lender, Borrowing, Rig]]


@pytest.fixture
def both(rigs: Rigs, namespace: str) -> Iterator[Make]:
    """Makes a lender, and a worker that reads what it lends. Their caches have other sizes."""
    made: list[Any] = []

    def make(
        layout: str = "LBHNC", *, other: dict[str, Any] | None = None, name: str = "", keeps: bool = True
    ) -> tuple[Lender, Borrowing, Rig]:
        shape: dict[str, Any] = {"layout": layout, "heads": 2, "tokens": 16, "content": 64}
        first = rigs(cache=Cache(blocks=24, **shape).fill(1), chunk_blocks=BLOCKS, listen="127.0.0.1:0")
        second = rigs(cache=Cache(**{**shape, "blocks": 40, **(other or {})}).fill(2), chunk_blocks=BLOCKS)
        borrowing = Borrowing(
            second.engine,
            second.paged,
            second.counts,
            namespace=name or namespace,
            shard=0,
            connect_timeout=5.0,
            threads=1,
            keeps=keeps,
        )
        second.loads._borrowing = borrowing
        made.extend([lender := Lender(first, namespace), borrowing])
        return lender, borrowing, second

    yield make
    for one in made:
        (one.lending if isinstance(one, Lender) else one).close()


def read(borrowing: Borrowing, lent: Lent, block_ids: list[int]) -> None:
    borrowing.read(lent, block_ids, time.monotonic() + SECONDS, 0)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
def test_what_is_lent_comes_and_nothing_else_changes(both: Make, layout: str) -> None:
    lender, borrowing, rig = both(layout)
    source, target = [5, 2, 9, 11, 0, 23, 7], [38, 3, 17, 39, 1, 0, 20]
    others = sorted(set(range(40)) - set(target))
    before = rig.cache.chunk(others)
    borrowing._blocks_together = 3
    read(borrowing, lender.lend(source), target)
    assert rig.cache.chunk(target) == lender.rig.cache.chunk(source)
    assert rig.cache.chunk(others) == before


def test_what_is_lent_no_more_is_not_read(both: Make) -> None:
    lender, borrowing, _ = both()
    lent = lender.lend([1, 2, 3])
    lender.lending.wipe([lent.slot])
    with pytest.raises(LeaseLostError):
        read(borrowing, lent, [1, 2, 3])
    # Nor with the lease that has the slot now.
    lender.lend([1, 2, 3])
    with pytest.raises(LeaseLostError):
        read(borrowing, lent, [1, 2, 3])


def test_what_is_lent_no_more_when_it_has_come_is_not_believed(both: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lender, borrowing, _ = both()
    lent, real = lender.lend([1, 2, 3]), borrowing._move

    def move(*args: Any) -> None:
        lender.lending.wipe([lent.slot])
        lender.rig.cache.fill(7)
        real(*args)

    monkeypatch.setattr(borrowing, "_move", move)
    with pytest.raises(LeaseLostError):
        read(borrowing, lent, [1, 2, 3])


def test_a_lease_that_is_about_to_come_is_waited_for(both: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lender, borrowing, rig = both()
    lent = lender.lend([1, 2, 3])
    lender.lending.wipe([lent.slot])
    real, tries = borrowing._check, []

    def check(*args: Any) -> None:
        tries.append(args)
        if len(tries) == 3:
            lender.lending.lend([LendJob(lent.slot, lent.token, lent.digest)])
        real(*args)

    monkeypatch.setattr(borrowing, "_check", check)
    read(borrowing, lent, [4, 5, 6])
    assert rig.cache.chunk([4, 5, 6]) == lender.rig.cache.chunk([1, 2, 3])


@pytest.mark.parametrize("what", ["blocks", "key", "token", "slot", "far slot", "incarnation", "shard", "nobody"])
def test_a_lease_that_somebody_made_up_gives_nothing(both: Make, what: str) -> None:
    lender, borrowing, _ = both()
    lent, key = lender.lend([1, 2, 3]), b"k" * 32
    ((address, incarnation),) = lent.peers
    wrong = {
        "blocks": {"block_ids": [1, 2, 4], "digest": digest_of(key, [1, 2, 4])},
        "key": {"digest": digest_of(b"o" * 32, [1, 2, 3])},
        "token": {"token": bytes(16)},
        "slot": {"slot": lent.slot + 1},
        "far slot": {"slot": 1 << 40},
        "incarnation": {"peers": ((address, incarnation[::-1]),)},
        "shard": {"peers": ()},
        "nobody": {"peers": (("127.0.0.1:1", incarnation),)},
    }[what]
    with pytest.raises(MoonpoolError):
        read(borrowing, replace(lent, **wrong), [1, 2, 3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "another"}, "another namespace"),
        ({"other": {"heads": 4}}, "another seal"),
        ({"other": {"layers": 4}}, "another seal"),
        ({"other": {"layout": "LBNHC"}}, "another seal"),
        ({"other": {"layout": "BHLNC"}}, "in other pieces"),
    ],
)
def test_a_cache_of_another_form_is_refused_with_the_reason(both: Make, options: dict[str, Any], words: str) -> None:
    lender, borrowing, _ = both(**options)
    with pytest.raises(CacheLayoutError, match=words):
        read(borrowing, lender.lend([1]), [1])


@pytest.mark.parametrize("form", ["{", "[]", '{"namespace": 7}', '{"storages": 1, "storage": [[]], "length": "x"}'])
def test_a_lender_that_says_something_else_of_its_cache_is_refused(both: Make, form: str) -> None:
    lender, borrowing, _ = both()
    there = memoryview(lender.lending._form).cast("B")
    there[:] = form.encode().ljust(len(there))
    with pytest.raises(CacheLayoutError, match="one version of moonpool"):
        read(borrowing, lender.lend([1]), [1])


def test_what_is_held_is_renewed_and_given_back_once(both: Make) -> None:
    lender, borrowing, _ = both()
    lent = lender.lend([1, 2], seconds=0.3)
    borrowing.hold([lent])
    for _ in range(3):
        assert lender.hears() == ({lent.token}, set())
    borrowing.give_back([lent.token])
    renewed, returned = lender.hears()
    while not returned:
        assert renewed == {lent.token}
        renewed, returned = lender.hears()
    assert returned == {lent.token}
    borrowing.give_back([lent.token, bytes(16)])
    time.sleep(0.3)
    assert lender.lending.heard() == (set(), set())


def test_a_lender_that_does_not_answer_is_tried_once_for_all_that_it_lends(
    both: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, borrowing, _ = both()
    leases = [lender.lend([one], slot=one) for one in range(4)]
    other = replace(lender.lend([9], slot=9, seconds=0.3), peers=(*leases[0].peers, ("127.0.0.1:2", "cd" * 16)))
    tried, real = [], borrowing._lender

    def silent(lent: Lent, until: float) -> Any:
        if lent.peers == leases[0].peers:
            tried.append(lent.token)
            raise DeadlineError("it does not answer")
        return real(lent, until)

    monkeypatch.setattr(borrowing, "_lender", silent)
    borrowing.hold([*leases, other])
    for _ in range(3):
        assert lender.hears() == ({other.token}, set())
    assert tried == [leases[0].token]


def test_one_worker_of_several_speaks(both: Make) -> None:
    lender, borrowing, _ = both(keeps=False)
    lent = lender.lend([1, 2], seconds=0.3)
    borrowing.hold([lent])
    borrowing.give_back([lent.token])
    time.sleep(0.3)
    assert lender.lending.heard() == (set(), set())


def test_what_is_read_ends_with_the_worker(both: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lender, borrowing, rig = both()
    lent, arrived, go_on = lender.lend([1, 2]), threading.Event(), threading.Event()
    real = borrowing._move

    def move(*args: Any) -> None:
        arrived.set()
        assert go_on.wait(SECONDS)
        real(*args)

    monkeypatch.setattr(borrowing, "_move", move)
    load = rig.load(keys(1), [1, 2], tail_blocks=2, lent=lent)
    assert arrived.wait(SECONDS)
    borrowing.close()
    go_on.set()
    rig.loaded()
    # It has asked the pool, which has nothing.
    assert (load.good, load.reason) == (0, "missing")
    with pytest.raises(ClosedError):
        read(borrowing, lent, [1, 2])


def test_a_lender_that_is_gone_holds_nobody_up(both: Make) -> None:
    lender, borrowing, _ = both()
    lent = lender.lend([1, 2], seconds=0.3)
    read(borrowing, lent, [1, 2])
    lender.rig.engine.close()
    borrowing.hold([lent])
    begun = time.monotonic()
    with pytest.raises(MoonpoolError):
        read(borrowing, lent, [1, 2])
    assert time.monotonic() - begun < 10
    borrowing.give_back([lent.token])


@pytest.mark.parametrize("lost", [False, True])
def test_what_cannot_be_read_comes_from_the_pool(both: Make, lost: bool) -> None:
    lender, _, rig = both()
    hashes = keys(2)
    lender.rig.save(hashes[:1], range(4))
    lender.rig.save(hashes[1:], range(4, 6), hashes[0], tail_blocks=2)
    lender.rig.saved(2)
    rig.counted()
    lent = lender.lend(list(range(6)))
    if lost:
        lender.lending.wipe([lent.slot])
    load = rig.load(hashes, range(30, 36), tail_blocks=2, lent=lent)
    rig.loaded()
    assert (load.good, load.reason) == (2, "ok")
    assert rig.cache.chunk(list(range(30, 36))) == lender.rig.cache.chunk(list(range(6)))
    counts = rig.counted()
    assert (counts["loads_direct"], counts["loads_direct_failed"]) == (not lost, lost)


def test_a_cancelled_load_reads_nothing(both: Make) -> None:
    lender, _, rig = both()
    lent = lender.lend([1])
    load = rig.load(keys(1), [30], tail_blocks=1, lent=lent)
    rig.loads.cancel([load.job.request_id])
    rig.loaded()
    assert load.reason in ("cancelled", "ok")
