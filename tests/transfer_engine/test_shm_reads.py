# SPDX-License-Identifier: Apache-2.0
"""Registered memory of another process is read where it lies, whatever that process is doing, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import DeadlineError, MoonpoolError, Peer, PeerState, Status, TransferEngine

NBYTES = 8 << 20


def test_the_memory_of_a_stopped_owner_is_read_and_not_written(open_engine: OpenEngine) -> None:
    client = open_engine(transports="shm", listen=None)
    with Target(transports="shm") as target:
        target.add("copied", NBYTES, "copied")
        peer = client.connect(target.address)
        remote, local = peer.regions.wait("copied", 90.0), client.allocate(NBYTES)
        client.read(peer, local, remote).wait()
        target.pause()
        for digest in (False, True):
            memoryview(local)[:] = bytes(NBYTES)
            client.read(peer, local, remote, digest=digest, deadline=60.0).wait()
            assert bytes(local) == pattern(NBYTES)
        with pytest.raises(DeadlineError):
            client.write(peer, local, remote, deadline=0.2).wait()
        target.resume()
        peer.close()


def reading(client: TransferEngine, peer: Peer, name: str, reads: list[int], faults: list[str]) -> None:
    """Read a region over and over until that fails; every item that is said to be there has to be right."""
    block, wanted = 1 << 20, pattern(NBYTES)
    remote, local = peer.regions.wait(name, 90.0), client.allocate(NBYTES)
    blocks = [(local, at, remote, at, block) for at in range(0, NBYTES, block)]
    while True:
        memoryview(local)[:] = bytes(NBYTES)
        try:
            transfer = client.read(peer, blocks)
        except MoonpoolError:
            return
        with suppress(MoonpoolError):
            transfer.wait()
        got = bytes(local)
        for at, status in zip(range(0, NBYTES, block), transfer.statuses, strict=True):
            if status == Status.OK and got[at : at + block] != wanted[at : at + block]:
                faults.append(f"wrong bytes at {at}")
        if any(status != Status.OK for status in transfer.statuses):
            return
        reads.append(1)


ENDS: dict[str, Callable[[Target], object]] = {
    "is killed": Target.kill,
    "becomes another program": lambda target: target.ask("become_another_program"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_owner_that_ends_in_the_middle_is_never_taken_for_what_comes_after_it(
    open_engine: OpenEngine, end: str
) -> None:
    client = open_engine(transports="shm", listen=None)
    for round_ in range(3):
        with Target(transports="shm") as target:
            target.add("copied", NBYTES, "copied")
            peer = client.connect(target.address)
            reads, faults = list[int](), list[str]()
            threads = [threading.Thread(target=reading, args=(client, peer, "copied", reads, faults)) for _ in range(2)]
            for thread in threads:
                thread.start()
            assert eventually(lambda reads=reads, round_=round_: len(reads) > 2 * round_)
            ENDS[end](target)
            for thread in threads:
                thread.join(90.0)
                assert not thread.is_alive()
            assert faults == []
            assert eventually(lambda peer=peer: peer.state is not PeerState.READY)
            peer.close()
