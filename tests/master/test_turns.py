# SPDX-License-Identifier: Apache-2.0
"""Several masters over one store: who leads, who waits, and how callers find the one that leads."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from master_testing import call, eventually, hashes, stub
from master_testing.shared import SharedPlace

from moonpool.master import Master
from moonpool.master.errors import StoreLostError
from moonpool.node import StoreNode
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import MasterUnavailableError, NotLeaderError
from moonpool.store_client import Outcome, StoreClient

SECONDS = 60.0
Start = Callable[..., Master]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> SharedPlace:
    made = SharedPlace()
    monkeypatch.setattr("moonpool.master.server.open_store", made.store)
    return made


@pytest.fixture
def pair(place: SharedPlace, start_master: Start) -> list[Master]:
    """Two masters, of which the first leads."""
    return [start_master(lease_max=0.2, put_begin=0.2) for _ in range(2)]


@pytest.fixture
def client(pair: list[Master]) -> Iterator[StoreClient]:
    """A client of both, with a node."""
    masters = ",".join(master.address for master in pair)
    with StoreNode(master=masters, dram="8MiB", name="node"), StoreClient(masters, timeout=SECONDS) as made:
        yield made


def leads(master: Master) -> bool:
    return master.server.role.core is not None


def page(master: Master, name: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{master.http_address}{name}", timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_one_leads_and_the_other_says_who(pair: list[Master]) -> None:
    first, second = pair
    assert [leads(first), leads(second)] == [True, False]
    channel, pool = stub(second.address)
    with channel, pytest.raises(NotLeaderError) as caught:
        call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=hashes(1)))
    assert caught.value.leader == first.address
    assert caught.value.retryable
    assert first.address in str(caught.value)


def test_pages_tell_a_leader_from_one_that_waits(pair: list[Master]) -> None:
    first, second = pair
    assert [page(master, "/healthz")[0] for master in pair] == [200, 200]
    assert [page(master, "/leader")[0] for master in pair] == [200, 503]
    assert first.address in page(second, "/leader")[1]
    assert json.loads(page(first, "/status")[1])["leads"] is True
    told = json.loads(page(second, "/status")[1])
    assert (told["leads"], told["leader"]) == (False, first.address)
    assert "moonpool_master_leads 1\n" in page(first, "/metrics")[1]
    assert "moonpool_master_leads 0\n" in page(second, "/metrics")[1]


def test_the_next_leads_when_the_first_is_stopped(pair: list[Master], client: StoreClient) -> None:
    first, second = pair
    keys, values = [os.urandom(32) for _ in range(4)], [os.urandom(1000) for _ in range(4)]
    client.put("ns", keys, values).require()
    epoch = client.stats()["master"]["epoch"]
    first.close()
    eventually(lambda: leads(second), "the second leads")
    eventually(lambda: client.get("ns", keys).outcomes == bytes([Outcome.OK] * 4), "its node is back")
    assert client.get("ns", keys)[0] == values[0]
    client.put("ns", [os.urandom(32)], [b"after"]).require()
    told = client.stats()["master"]
    assert (told["address"], told["epoch"] > epoch) == (second.address, True)


def test_a_master_whose_store_was_taken_leads_no_longer(
    pair: list[Master], place: SharedPlace, client: StoreClient
) -> None:
    first, second = pair
    old = first.server.core
    key = os.urandom(32)
    client.put("ns", [key], [b"before"]).require()
    with place.changed:
        holder, place.holder = place.holder, None  # nobody is told
        channel, pool = stub(first.address)
        with channel, pytest.raises(NotLeaderError, match="cannot tell whether it still leads"):
            call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=key))
        assert page(first, "/leader") == (503, "it cannot tell whether it still leads\n")
        assert json.loads(page(first, "/status")[1])["leads"] is False
        place.changed.notify_all()
    assert holder is not None
    holder.taken.set_result(StoreLostError("another master leads"))
    eventually(lambda: leads(first) or leads(second), "one of them leads")
    eventually(lambda: client.get("ns", [key])[0] == b"before", "the chunk is found again")
    eventually(old.closing.is_set, "its turn is over")
    assert sum(map(leads, pair)) == 1


def test_turns_go_back_and_forth(pair: list[Master], place: SharedPlace, client: StoreClient) -> None:
    known: dict[bytes, bytes] = {}
    for _ in range(4):
        key = os.urandom(32)
        known[key] = os.urandom(500)
        client.put("ns", [key], [known[key]]).require()
        leader = next(master for master in pair if leads(master))
        turns = sum(master.server.role.turns for master in pair)
        place.take_away()
        eventually(lambda turns=turns: sum(m.server.role.turns for m in pair) > turns, "another turn")
        assert leader.server.role.turns >= 1
        eventually(lambda: client.exists("ns", list(known)).all(), "all are found again")
        got = client.get("ns", list(known))
        assert [got[number] for number in range(len(known))] == list(known.values())


def test_a_client_that_knows_one_that_waits_is_led_to_the_leader(pair: list[Master]) -> None:
    with StoreClient(pair[1].address) as client:
        assert not client.exists("ns", [os.urandom(32)])[0]
        assert client.stats()["master"]["address"] == pair[0].address


def test_nobody_leads(pair: list[Master]) -> None:
    with StoreClient(",".join(master.address for master in pair)) as client:
        for master in pair:
            master.close()
        with pytest.raises(MasterUnavailableError):
            client.exists("ns", [os.urandom(32)], timeout=0.5)
