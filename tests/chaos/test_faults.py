# SPDX-License-Identifier: Apache-2.0
"""`moonpool.transfer_engine.testing.FaultyEngine`, over every transport of this host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import PATIENT, OpenEngine
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import (
    BatchError,
    ConfigError,
    DeadlineError,
    DigestMismatchError,
    InvalidArgumentError,
    Peer,
    Region,
    RegionBusyError,
    RegionNotFoundError,
    RemoteRegion,
    Status,
    TransferState,
    TransportUnavailableError,
    WaitTimeoutError,
    probe,
)
from moonpool.transfer_engine.testing import Faults, FaultsMade, FaultyEngine

NBYTES = 1 << 20
ITEMS = np.arange(64) * 8192


@dataclass
class Faulty:
    engine: FaultyEngine
    peer: Peer
    local: Region
    remote: RemoteRegion
    target: Target

    def read(self, **options: Any) -> Any:
        return self.engine.read(self.peer, self.local, self.remote, ITEMS, ITEMS, 4096, **options)

    def write(self, **options: Any) -> Any:
        return self.engine.write(self.peer, self.local, self.remote, ITEMS, ITEMS, 4096, **options)


@pytest.fixture(params=[transport.name for transport in probe() if transport.available and transport.name != "local"])
def faulty(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Faulty]:
    """An engine without faults yet, connected to another process."""
    path: str = request.param
    options = {"transports": path, "require": path, "listen": None, **PATIENT}
    with Target({"kv": NBYTES}, transports=path) as target, FaultyEngine(Faults(), "faulty", **options) as engine:
        peer = engine.connect(target.address)
        assert peer.path == path
        yield Faulty(engine, peer, engine.allocate(NBYTES), peer.regions["kv"], target)


def test_without_faults_it_is_an_engine(faulty: Faulty) -> None:
    faulty.read(notify=b"read").wait()
    assert bytes(faulty.local)[:4096] == pattern(NBYTES)[:4096]
    faulty.write(digest=True).wait()
    assert faulty.target.ask("notifications", timeout=90.0) == [b"read".hex()]
    assert faulty.engine.faults_made() == FaultsMade(0, 0, 0, 0, 0)


def test_delayed_transfers_come(faulty: Faulty) -> None:
    faulty.engine.set_faults(Faults(delay=1.0, delay_seconds=(0.01, 0.02)))
    transfers = [faulty.read() for _ in range(20)]
    assert not transfers[0].done()
    for transfer in transfers:
        transfer.wait()
    assert faulty.engine.faults_made().delayed == 20
    assert bytes(faulty.local)[:4096] == pattern(NBYTES)[:4096]


def test_dropped_transfers_own_their_buffers_until_they_end(faulty: Faulty) -> None:
    faulty.engine.set_faults(Faults(drop=1.0))
    transfer = faulty.write()
    with pytest.raises(WaitTimeoutError):
        transfer.wait(0.02)
    with pytest.raises(RegionBusyError):
        faulty.local.release()
    assert transfer.cancel() is TransferState.STOPPED
    with pytest.raises(DeadlineError):
        faulty.write(deadline=0.05, notify=b"never").wait()
    faulty.local.release()
    assert faulty.target.ask("intact", name="kv")
    assert faulty.target.ask("notifications", timeout=0.0) == []


def test_errors_are_of_the_status_that_was_asked_for(faulty: Faulty) -> None:
    faulty.engine.set_faults(Faults(error=1.0, error_status=Status.DEADLINE))
    with pytest.raises(DeadlineError, match="injected"):
        faulty.write().wait()
    assert faulty.target.ask("intact", name="kv")


def test_partial_transfers_say_what_is_there(faulty: Faulty) -> None:
    faulty.engine.set_faults(Faults(seed=2, partial=1.0, partial_share=0.3))
    transfer = faulty.read(notify=b"never")
    with pytest.raises(BatchError) as caught:
        transfer.wait()
    assert isinstance(caught.value.__cause__, RegionNotFoundError)
    assert 1 <= len(caught.value.failed) < len(ITEMS)
    for index, (offset, status) in enumerate(zip(ITEMS, transfer.statuses, strict=True)):
        here = bytes(memoryview(faulty.local)[offset : offset + 4096])
        assert here == (bytes(4096) if index in caught.value.failed else pattern(NBYTES)[offset : offset + 4096])
        assert (status == Status.OK) == (index not in caught.value.failed)
    assert faulty.target.ask("notifications", timeout=0.0) == []


@pytest.mark.parametrize("op", ["read", "write"])
def test_corruption_is_found_by_the_digest_and_by_nothing_else(faulty: Faulty, op: str) -> None:
    faulty.engine.set_faults(Faults(seed=3, corrupt=1.0))
    fill(faulty.local, seed=1)
    move = getattr(faulty, op)
    with pytest.raises((BatchError, DigestMismatchError)) as caught:
        move(digest=True, notify=b"never").wait()
    assert caught.value.code == "DIGEST"
    assert faulty.target.ask("notifications", timeout=0.0) == []
    move().wait()
    here = np.frombuffer(faulty.local, np.uint8)
    there = np.frombuffer(bytes.fromhex(faulty.target.ask("content", name="kv", offset=0, length=NBYTES)), np.uint8)
    moved = (ITEMS[:, np.newaxis] + np.arange(4096)).ravel()
    assert int(np.unpackbits(here[moved] ^ there[moved]).sum()) == 1
    # What was to be written is as it was.
    assert op == "read" or bytes(here) == pattern(NBYTES, seed=1)


def test_a_faulty_engine_can_be_peer_and_closed_in_the_middle(open_engine: OpenEngine) -> None:
    with FaultyEngine(Faults(drop=0.5, delay=0.5, seed=5), "faulty", **PATIENT) as engine:
        engine.allocate(NBYTES, name="kv")
        client = open_engine("client", listen=None)
        peer = client.connect(engine.address or "")
        client.read(peer, client.allocate(NBYTES), peer.regions["kv"]).wait()
        client.allocate(NBYTES, name="theirs")
        other = open_engine("other")
        other.allocate(NBYTES, name="kv")
        remote = engine.connect(other.address or "")
        local = engine.allocate(NBYTES)
        transfers = [engine.read(remote, local, remote.regions["kv"]) for _ in range(32)]
    assert all(transfer.settled for transfer in transfers)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Faults(drop=1.5),
        lambda: Faults(delay="often"),  # type: ignore[arg-type]
        lambda: Faults(corrupt=float("nan")),
        lambda: Faults(seed=-1),
        lambda: Faults(seed=1 << 100_000),
        lambda: Faults(seed=True),
        lambda: Faults(drop=-0.1),
        lambda: Faults(partial_share=float("inf")),
        lambda: Faults(delay_seconds=-1.0),
        lambda: Faults(delay_seconds="x"),  # type: ignore[arg-type]
        lambda: Faults(delay_seconds=None),  # type: ignore[arg-type]
        lambda: Faults(delay_seconds=float("nan")),
        lambda: Faults(delay_seconds=float("inf")),
        lambda: Faults(delay_seconds=(0.1, float("inf"))),
        lambda: Faults(delay_seconds=(0.1, 0.2, 0.3)),  # type: ignore[arg-type]
        lambda: Faults(delay_seconds=1 << 100_000),
        lambda: Faults(delay_seconds=(0.2, 0.1)),
        lambda: Faults(delay_seconds=1e9),
        lambda: Faults(error_status=Status.OK),
        lambda: Faults(partial_status=19),  # type: ignore[arg-type]
    ],
)
def test_faults_are_strict(wrong: Callable[[], Faults]) -> None:
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert caught.value.hint


def test_faults_are_values() -> None:
    faults = Faults(seed=1, drop=0.1)
    assert dataclasses.replace(faults, seed=1) == faults
    with pytest.raises(TypeError):
        Faults(lose=0.1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError):
        FaultyEngine(0.1)  # type: ignore[arg-type]


def test_settings_are_those_of_every_engine() -> None:
    with pytest.raises(TransportUnavailableError):
        FaultyEngine(Faults(), transports="carrier-pigeon")
    with pytest.raises(ConfigError):
        FaultyEngine(Faults(), lanes=-1)
