# SPDX-License-Identifier: Apache-2.0
"""T2.

What people met: a write was reported complete although the receiver had dropped it.

What must happen instead: completion only after the far side has applied all bytes; kill the receiver in the middle of a
write: the sender sees a failure, never success.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import MoonpoolError, PeerLostError, Status, TransferState, WaitTimeoutError

NBYTES = 32 << 20


@pytest.mark.parametrize("nbytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_bytes_that_only_lie_in_the_receivers_socket_are_not_written(
    open_engine: OpenEngine, transports: str, nbytes: int
) -> None:
    """All of it fits into the kernel's buffers, so the sender has long sent everything; but nobody has applied it.

    Over shm it is the request to copy that lies there.
    """
    client = open_engine(listen=None, transports=transports)
    with Target(transports=transports) as target:
        target.add("kv", nbytes, "copied")
        peer = client.connect(target.address)
        local = client.allocate(nbytes)
        client.read(peer, local, peer.regions.wait("kv", 90.0)).wait()
        fill(local, seed=1)
        target.pause()
        transfer = client.write(peer, local, peer.regions["kv"])
        with pytest.raises(WaitTimeoutError):
            transfer.wait(timeout=0.1)
        target.resume()
        transfer.wait()
        assert target.ask("content", name="kv", offset=0, length=nbytes) == pattern(nbytes, seed=1).hex()
        peer.close()


def test_a_write_into_shared_memory_is_in_place_although_its_owner_is_stopped(open_engine: OpenEngine) -> None:
    """The writer puts the bytes there by itself, so that it may say so."""
    client = open_engine(listen=None, transports="shm")
    with Target({"kv": NBYTES}, transports="shm") as target:
        peer = client.connect(target.address)
        local = client.allocate(NBYTES)
        client.read(peer, local, peer.regions["kv"], 0, 0, 64).wait()
        fill(local, seed=1)
        target.pause()
        client.write(peer, local, peer.regions["kv"]).wait()
        target.resume()
        assert target.ask("content", name="kv", offset=0, length=NBYTES) == pattern(NBYTES, seed=1).hex()
        peer.close()


@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_the_receiver_is_killed_in_the_middle_of_a_write(open_engine: OpenEngine, transports: str) -> None:
    client = open_engine(listen=None, transports=transports)
    with Target(transports=transports) as target:
        target.add("kv", NBYTES, "copied")
        peer = client.connect(target.address)
        local = client.allocate(NBYTES)
        client.read(peer, local, peer.regions.wait("kv", 90.0), 0, 0, 64).wait()
        target.pause()
        whole = client.write(peer, local, peer.regions["kv"])
        offsets = np.arange(0, NBYTES, 4096)
        batch = client.write(peer, local, peer.regions["kv"], offsets, offsets, 4096)
        with pytest.raises(WaitTimeoutError):
            whole.wait(timeout=0.1)
        target.kill()
        for transfer in (whole, batch):
            with pytest.raises(PeerLostError) as caught:
                transfer.wait()
            assert caught.value.retryable
            assert target.address in caught.value.peer
            assert transfer.state is not TransferState.COMPLETED
            assert Status.OK not in transfer.statuses
            # The process is gone, so nothing can be written any more, and the buffers come back.
            transfer.cancel()
            assert transfer.settled
        local.release()


@pytest.mark.parametrize("round_", range(6))
@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_whatever_was_reported_written_is_there(
    open_engine: OpenEngine, tmp_path: Path, transports: str, round_: int
) -> None:
    """Killed at any moment, the receiver holds every byte that was reported: its memory is a file that outlives it."""
    file = tmp_path / "memory"
    file.write_bytes(bytes(NBYTES))
    client = open_engine(listen=None, transports=transports)
    with Target(transports=transports) as target:
        target.ask("register_file", name="kv", path=str(file), nbytes=NBYTES)
        peer = client.connect(target.address)
        remote = peer.regions.wait("kv", 90.0)
        local = client.allocate(NBYTES)
        fill(local, seed=2)
        blocks = np.arange(0, NBYTES, 64 << 10)
        transfers = [client.write(peer, local, remote, part, part, 64 << 10) for part in np.array_split(blocks, 16)]
        # A different moment in each round: after so many of the transfers.
        for transfer in transfers[: 2 * round_]:
            transfer.wait()
        target.kill()
        written = file.read_bytes()
        for part, transfer in zip(np.array_split(blocks, 16), transfers, strict=True):
            failed = False
            try:
                transfer.wait()
            except MoonpoolError:
                failed = True
            assert failed == (transfer.state is not TransferState.COMPLETED)
            for block, status in zip(part, transfer.statuses, strict=True):
                if status == Status.OK:
                    assert written[block : block + (64 << 10)] == pattern(NBYTES, seed=2)[block : block + (64 << 10)]
            assert failed or transfer.statuses == bytes(len(part))
        assert all(transfer.state is TransferState.COMPLETED for transfer in transfers[: 2 * round_])
