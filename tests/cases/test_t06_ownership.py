# SPDX-License-Identifier: Apache-2.0
"""T6.

What people met: after a time-out the caller reused memory that was still being written.

What must happen instead: buffers stay owned until nothing can write them; `cancel()` waits for that; the time-out error
says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.leaks import eventually
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import (
    DeadlineError,
    Peer,
    PeerLostError,
    Region,
    RegionBusyError,
    RemoteRegion,
    TransferEngine,
    TransferState,
    WaitTimeoutError,
)
from moonpool.transfer_engine.testing import FaultProxy

NBYTES = 16 << 20


@pytest.fixture
def halfway(open_engine: OpenEngine) -> Iterator[tuple[Pair, FaultProxy]]:
    """A pair behind a relay that stalls by itself in the middle of a large transfer."""
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None)
    region = server.allocate(NBYTES, name="kv")
    with FaultProxy(server.address or "") as network:
        network.stall(after_bytes=4 << 20)
        peer = client.connect(network.address)
        local = client.allocate(NBYTES)
        yield Pair(client, server, peer, local, region, peer.regions["kv"]), network
        network.resume()
        client.close()
        server.close()


def test_a_wait_that_timed_out_leaves_the_buffers_owned(halfway: tuple[Pair, FaultProxy]) -> None:
    pair, network = halfway
    fill(pair.region)
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    assert network.stalled.wait(100)
    with pytest.raises(WaitTimeoutError) as caught:
        transfer.wait(timeout=0.05)
    for words in ("still owns", "cancel()"):
        assert words in str(caught.value)
    assert not transfer.settled
    with pytest.raises(RegionBusyError):
        pair.local.release()
    network.resume()
    transfer.wait()
    assert bytes(pair.local) == pattern(NBYTES)


def test_nothing_lands_in_the_buffers_of_a_cancelled_read(halfway: tuple[Pair, FaultProxy]) -> None:
    pair, network = halfway
    fill(pair.region)
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    assert network.stalled.wait(100)
    # Megabytes of the answer are still in the network when cancel returns.
    assert transfer.cancel() is TransferState.STOPPED
    reused = memoryview(pair.local)
    reused[:] = b"\xa5" * NBYTES
    network.resume()
    # Another transfer over the same lanes, which have to get rid of the rest of that answer first.
    other = pair.client.allocate(1 << 20)
    for _ in range(8):
        pair.client.read(pair.peer, other, pair.remote, 0, 0, 1 << 20).wait()
    assert bytes(other) == pattern(NBYTES)[: 1 << 20]
    assert bytes(reused) == b"\xa5" * NBYTES


def test_nothing_is_written_at_the_far_side_after_a_cancelled_write_has_settled(
    halfway: tuple[Pair, FaultProxy],
) -> None:
    pair, network = halfway
    fill(pair.local, seed=1)
    transfer = pair.client.write(pair.peer, pair.local, pair.remote)
    assert network.stalled.wait(100)
    with pytest.raises(WaitTimeoutError, match="not settled in time"):
        transfer.cancel(timeout=0.05)
    assert transfer.state in (TransferState.UNSETTLED, TransferState.RUNNING)
    with pytest.raises(RegionBusyError):
        pair.local.release()
    network.resume()
    assert transfer.cancel() is TransferState.STOPPED
    before = bytes(pair.region)
    memoryview(pair.local)[:] = b"\xa5" * NBYTES
    # Whatever was still under way would have arrived before the answer to this.
    pair.client.read(pair.peer, pair.client.allocate(64), pair.remote, 0, 0, 64).wait()
    assert bytes(pair.region) == before
    assert b"\xa5" * 64 not in before


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_expired_deadline_says_whether_the_buffers_are_free(halfway: tuple[Pair, FaultProxy], op: str) -> None:
    pair, network = halfway
    transfer = getattr(pair.client, op)(pair.peer, pair.local, pair.remote)
    assert network.stalled.wait(100)
    expiring = getattr(pair.client, op)(pair.peer, pair.local, pair.remote, deadline=0.05)
    with pytest.raises(DeadlineError) as caught:
        expiring.wait()
    assert ("still owns" in str(caught.value)) == (expiring.state is TransferState.UNSETTLED)
    network.resume()
    assert eventually(lambda: expiring.settled)
    assert expiring.state is TransferState.EXPIRED
    transfer.wait()
    pair.local.release()


# ---------------------------------------------------------------- writes over shm: the owner of the region is stopped


Stopped = tuple[TransferEngine, Peer, Region, RemoteRegion, Target]


@pytest.fixture
def stopped(open_engine: OpenEngine) -> Iterator[Stopped]:
    """A client whose peer has registered memory, to which it copies itself, and does not get to it."""
    client = open_engine("client", transports="shm", listen=None)
    with Target(transports="shm") as target:
        target.add("kv", NBYTES, "copied")
        peer = client.connect(target.address)
        local, remote = client.allocate(NBYTES), peer.regions.wait("kv", 90.0)
        client.read(peer, local, remote, 0, 0, 64).wait()
        target.pause()
        yield client, peer, local, remote, target
        target.resume()
        peer.close()


def test_over_shm_the_buffers_stay_owned_until_the_owner_has_answered(stopped: Stopped) -> None:
    client, peer, local, remote, target = stopped
    transfer = client.write(peer, local, remote)
    with pytest.raises(WaitTimeoutError):
        transfer.wait(timeout=0.05)
    with pytest.raises(RegionBusyError):
        local.release()
    with pytest.raises(WaitTimeoutError, match="not settled in time"):
        transfer.cancel(timeout=0.05)
    assert not transfer.settled
    with pytest.raises(RegionBusyError):
        local.release()
    target.resume()
    assert transfer.cancel() in (TransferState.STOPPED, TransferState.COMPLETED)
    memoryview(local)[:] = b"\xa5" * NBYTES
    # Whatever was still under way would have come before the answer to this.
    client.write(peer, client.allocate(64), remote, 0, 0, 64).wait()
    assert b"\xa5" * 64 not in bytes.fromhex(target.ask("content", name="kv", offset=0, length=NBYTES))
    local.release()


def test_over_shm_an_expired_deadline_says_whether_the_buffers_are_free(stopped: Stopped) -> None:
    client, peer, local, remote, target = stopped
    transfer = client.write(peer, local, remote, deadline=0.05)
    with pytest.raises((DeadlineError, WaitTimeoutError)):
        transfer.wait(timeout=1.0)
    assert not transfer.settled
    target.resume()
    assert eventually(lambda: transfer.settled)
    assert transfer.state in (TransferState.EXPIRED, TransferState.COMPLETED)
    local.release()


def test_over_shm_the_death_of_the_owner_gives_the_buffers_back(stopped: Stopped) -> None:
    client, peer, local, remote, target = stopped
    transfer = client.write(peer, local, remote)
    target.kill()
    with pytest.raises(PeerLostError):
        transfer.wait()
    transfer.cancel()
    assert transfer.settled
    local.release()
