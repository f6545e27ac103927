# SPDX-License-Identifier: Apache-2.0
"""Cutting off a peer: what it had begun is over when the call returns."""

from __future__ import annotations

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import ClosedError, InvalidArgumentError, RegionBusyError, Status, TransferEngine

NBYTES, BLOCK = 256 << 20, 1 << 20


@pytest.mark.parametrize("kind", ["mapped", "copied"])
@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_nothing_that_was_begun_arrives_afterwards(open_engine: OpenEngine, transports: str, kind: str) -> None:
    server = open_engine(transports=transports)
    memory = server.allocate(NBYTES, "kv") if kind == "mapped" else bytearray(NBYTES)
    if isinstance(memory, bytearray):
        server.register(memory, "kv")
    with Target(transports=transports, listen=None) as client:
        client.ask("connect", address=server.address)
        client.ask("begin_write", name="kv", block=BLOCK)
        with memoryview(memory) as view:
            assert eventually(lambda: view[0] == pattern(1, seed=1)[0])
            assert server.fence(client.incarnation) == 1
            fenced = bytes(view)
            statuses = client.ask("end_write")["statuses"]
            assert bytes(view) == fenced
            assert set(statuses) <= {Status.OK, Status.PEER_LOST}
            for index, status in enumerate(statuses):
                place = slice(index * BLOCK, (index + 1) * BLOCK)
                assert status != Status.OK or view[place] == pattern(NBYTES, seed=1)[place]
        # It may come back.
        assert client.ask("read", name="kv")["paths"] == [transports]
        client.ask("disconnect")


def test_a_peer_that_was_stopped_in_a_copy_is_named(open_engine: OpenEngine) -> None:
    """Stopped between two copies it is only cut off: what follows goes nowhere."""
    server = open_engine(transports="shm", progress_timeout=0.3)
    region = server.allocate(NBYTES, "kv")
    first = pattern(NBYTES, seed=1)[0]
    with Target(transports="shm", listen=None) as client, memoryview(region) as view:
        for _ in range(20):
            view[0] = first ^ 1
            client.ask("connect", address=server.address)
            client.ask("begin_write", name="kv", block=NBYTES)
            while view[0] != first:
                pass
            client.pause()
            busy = ""
            try:
                server.fence(client.incarnation)
            except RegionBusyError as error:
                busy = str(error)
            fenced = bytes(view)
            client.resume()
            client.ask("end_write")
            client.ask("disconnect")
            if busy:
                break
            assert bytes(view) == fenced
        assert "cut off, but was stopped" in busy


def test_nobody_is_cut_off_by_another_name(open_engine: OpenEngine) -> None:
    server, client = open_engine(), open_engine(listen=None)
    peer = client.connect(server.address or "")
    assert server.fence("0" * 32) == 0
    assert server.fence(peer.incarnation) == 0  # its own
    assert server.fence(client.incarnation.upper()) == 1


@pytest.mark.parametrize("bad", ["", "0" * 31, "0" * 33, "g" * 32, "0x" + "0" * 30])
def test_what_is_no_incarnation_is_refused(open_engine: OpenEngine, bad: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no incarnation"):
        open_engine().fence(bad)


def test_a_closed_engine_has_nobody_to_cut_off() -> None:
    engine = TransferEngine("server")
    engine.close()
    with pytest.raises(ClosedError):
        engine.fence("0" * 32)
