# SPDX-License-Identifier: Apache-2.0
"""Reads and writes over every transport: what they move, what they say about each item, and how they end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.leaks import eventually
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import (
    ClosedError,
    DeadlineError,
    InvalidArgumentError,
    OutOfRangeError,
    RegionBusyError,
    RegionReleasedError,
    Status,
    Transfer,
    TransferCancelledError,
    TransferState,
    WaitTimeoutError,
    digest,
)
from moonpool.transfer_engine.testing import FaultProxy

# -------------------------------------------------------------------- moving bytes


def test_read_brings_the_bytes_of_the_peer(pair: Pair) -> None:
    fill(pair.region)
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    assert transfer.wait() is transfer
    assert bytes(pair.local) == pattern(pair.local.nbytes)
    assert bytes(pair.region) == pattern(pair.local.nbytes)


def test_write_puts_the_bytes_at_the_peer(pair: Pair) -> None:
    fill(pair.local)
    pair.client.write(pair.peer, pair.local, pair.remote).wait()
    assert bytes(pair.region) == pattern(pair.local.nbytes)


@pytest.mark.parametrize("length", [1, 2, 3, 4095, 4097, (1 << 20) - 1, (5 << 20) + 3])
def test_odd_lengths_touch_nothing_else(open_pair: Any, transport: str, length: int) -> None:
    pair: Pair = open_pair(transport, nbytes=6 << 20)
    fill(pair.region)
    pair.client.read(pair.peer, pair.local, pair.remote, 7, 13, length).wait()
    got = bytes(pair.local)
    assert got[7 : 7 + length] == pattern(6 << 20)[13 : 13 + length]
    assert not any(got[:7])
    assert not any(got[7 + length :])
    fill(pair.local, seed=1)
    pair.client.write(pair.peer, pair.local, pair.remote, 11, 17, length).wait()
    expected = bytearray(pattern(6 << 20))
    expected[17 : 17 + length] = pattern(6 << 20, seed=1)[11 : 11 + length]
    assert bytes(pair.region) == bytes(expected)


def test_a_large_transfer_over_several_lanes(open_pair: Any) -> None:
    pair: Pair = open_pair("tcp", nbytes=24 << 20, lanes=4)
    fill(pair.region)
    pair.client.read(pair.peer, pair.local, pair.remote).wait()
    assert bytes(pair.local) == pattern(24 << 20)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_between_two_processes(open_engine: OpenEngine, path: str) -> None:
    client = open_engine(listen=None, transports=path)
    with Target({"kv": 8 << 20}) as target:
        peer = client.connect(target.address)
        assert peer.path == path
        local = client.allocate(8 << 20)
        client.read(peer, local, peer.regions["kv"]).wait()
        assert bytes(local) == pattern(8 << 20)
        fill(local, seed=2)
        client.write(peer, local, peer.regions["kv"], digest=True).wait()
        assert target.ask("content", name="kv", offset=1000, length=64) == pattern(8 << 20, seed=2)[1000:1064].hex()
        peer.close()


def test_lengths_none_is_the_rest_of_the_source(pair: Pair) -> None:
    fill(pair.region)
    pair.client.read(pair.peer, pair.local, pair.remote, 0, 1000).wait()
    assert bytes(memoryview(pair.local)[: (1 << 16) - 1000]) == pattern(1 << 16)[1000:]
    small = pair.client.allocate(100)
    fill(small, seed=3)
    pair.client.write(pair.peer, small, pair.remote, 10, 5).wait()
    assert bytes(memoryview(pair.region)[5:95]) == pattern(100, seed=3)[10:]


def test_lengths_none_never_cuts_off(pair: Pair) -> None:
    """A destination that is too small is an error, not a shorter transfer."""
    with pytest.raises(OutOfRangeError):
        pair.client.read(pair.peer, pair.client.allocate(100), pair.remote)
    with pytest.raises(OutOfRangeError):
        pair.client.write(pair.peer, pair.client.allocate(1 << 17), pair.remote)
    with pytest.raises(OutOfRangeError):
        pair.client.read(pair.peer, pair.local, pair.remote, 0, 1 << 16)


def test_reading_and_writing_at_once_from_many_threads(open_pair: Any, transport: str) -> None:
    pair: Pair = open_pair(transport, nbytes=1 << 20)
    fill(pair.region)
    bad: list[int] = []

    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        local = pair.client.allocate(1 << 16)
        expected = pattern(1 << 20)
        for _ in range(100):
            offset = int(rng.integers(0, (1 << 20) - 4096))
            length = int(rng.integers(1, 4096))
            pair.client.read(pair.peer, local, pair.remote, 0, offset, length).wait()
            if bytes(memoryview(local)[:length]) != expected[offset : offset + length]:
                bad.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad


# -------------------------------------------------------------------- the life of a transfer


def test_a_finished_transfer(pair: Pair) -> None:
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, [0, 64], 0, 64)
    assert transfer.result() == bytes(2)
    assert transfer.result(timeout=0) == transfer.statuses == bytes([Status.OK] * 2)
    assert (transfer.done(), transfer.settled, transfer.state, transfer.error, transfer.digests) == (
        True, True, TransferState.COMPLETED, None, None,
    )  # fmt: skip
    assert transfer.cancel() is TransferState.COMPLETED
    assert transfer.peer is pair.peer
    assert repr(transfer) == f"<Transfer read of 2 items, completed, {pair.peer!r}>"


def test_a_failed_transfer_raises_each_time(pair: Pair) -> None:
    pair.region.release()
    assert eventually(lambda: "kv" not in pair.peer.regions)
    try:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 64)
    except RegionReleasedError:
        return  # the news was here first: refused at once
    for _ in range(2):
        with pytest.raises(RegionReleasedError):
            transfer.wait()
    assert isinstance(transfer.error, RegionReleasedError)


def test_a_failed_transfer_keeps_nothing_alive(pair: Pair) -> None:
    """Its exception, with a traceback through `wait`, is no cycle: the buffers go when the last reference goes."""
    region = pair.client.allocate(64)
    transfer = pair.client.write(pair.peer, region, pair.remote, deadline=1e-9)
    alive = weakref.ref(region)
    gc.disable()
    try:
        with contextlib.suppress(DeadlineError):
            transfer.wait()
        assert transfer.cancel() is TransferState.EXPIRED
        region.release()
        del region, transfer
        assert alive() is None
    finally:
        gc.enable()


def test_a_transfer_cannot_be_made_directly() -> None:
    with pytest.raises(TypeError, match="read"):
        Transfer()


@pytest.fixture
def stalled(open_engine: OpenEngine) -> Any:
    """A client behind a relay that can be stalled, with transfers that then hang."""
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None)
    region = server.allocate(4 << 20, name="kv")
    fill(region)
    with FaultProxy(server.address or "") as network:
        peer = client.connect(network.address)
        local = client.allocate(4 << 20)
        client.read(peer, local, peer.regions["kv"], 0, 0, 1 << 16).wait()
        network.stall()
        yield Pair(client, server, peer, local, region, peer.regions["kv"]), network
        network.resume()
        client.close()
        server.close()


def test_a_wait_that_ends_early(stalled: tuple[Pair, Any]) -> None:
    pair, network = stalled
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    with pytest.raises(WaitTimeoutError) as caught:
        transfer.wait(timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert "still owns" in str(caught.value)
    assert "cancel()" in str(caught.value)
    assert "server" in str(caught.value)
    for timeout in (0, -1, -0.0):
        with pytest.raises(WaitTimeoutError):
            transfer.wait(timeout)
    assert (transfer.done(), transfer.settled, transfer.error) == (False, False, None)
    assert transfer.state is TransferState.RUNNING
    assert transfer.statuses == bytes([Status.PENDING])
    network.resume()
    transfer.wait()
    assert bytes(pair.local) == pattern(4 << 20)


def test_a_region_in_use_cannot_be_released(stalled: tuple[Pair, Any]) -> None:
    pair, network = stalled
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    with pytest.raises(RegionBusyError) as caught:
        pair.local.release()
    assert caught.value.hint
    assert not pair.local.released
    network.resume()
    transfer.wait()
    pair.local.release()


def test_a_dropped_transfer_goes_on(stalled: tuple[Pair, Any]) -> None:
    pair, network = stalled
    pair.client.write(pair.peer, pair.local, pair.remote, 0, 0, 1 << 16, notify=b"done")
    network.resume()
    (notification,) = pair.server.notifications(timeout=90.0)
    assert notification.payload == b"done"


def test_the_deadline_ends_a_transfer(stalled: tuple[Pair, Any]) -> None:
    pair, _ = stalled
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, deadline=0.1)
    with pytest.raises(DeadlineError) as caught:
        transfer.wait()
    assert isinstance(caught.value, TimeoutError)
    assert transfer.state in (TransferState.EXPIRED, TransferState.UNSETTLED)


def test_the_deadline_of_a_batch_is_no_batch_error(stalled: tuple[Pair, Any]) -> None:
    pair, _ = stalled
    offsets = np.arange(100) * 4096
    with pytest.raises(DeadlineError):
        pair.client.read(pair.peer, pair.local, pair.remote, offsets, offsets, 4096, deadline=0.1).wait()


@pytest.mark.parametrize("deadline", [0, -1, -0.5, 1e-12])
def test_a_deadline_that_has_passed(pair: Pair, deadline: float) -> None:
    with pytest.raises(DeadlineError):
        pair.client.read(pair.peer, pair.local, pair.remote, deadline=deadline).wait()


@pytest.mark.parametrize("ago", [0, 0.001, 1e6, 1e12])
def test_a_time_that_has_passed(pair: Pair, ago: float) -> None:
    before = bytes(pair.region)
    with pytest.raises(DeadlineError):
        pair.client.write(pair.peer, pair.local, pair.remote, deadline_at=time.monotonic() - ago).wait()
    assert bytes(pair.region) == before


@pytest.mark.parametrize(("deadline", "after"), [(0.05, 60), (60, 0.05), (None, 0.05)])
def test_the_earlier_of_two_deadlines_holds(stalled: tuple[Pair, Any], deadline: float | None, after: float) -> None:
    pair, _ = stalled
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        pair.client.read(pair.peer, pair.local, pair.remote, deadline=deadline, deadline_at=started + after).wait()
    assert 0.05 <= time.monotonic() - started < 30


@pytest.mark.parametrize("seconds", ["1", b"1", [], float("nan"), float("inf"), 1e300])
def test_impossible_times(open_pair: Any, seconds: Any) -> None:
    pair: Pair = open_pair("local")
    for call in (
        lambda: pair.client.read(pair.peer, pair.local, pair.remote, deadline=seconds),
        lambda: pair.client.read(pair.peer, pair.local, pair.remote, deadline_at=seconds),
        lambda: pair.peer.regions.wait("kv2", seconds),
        lambda: pair.client.notifications(timeout=seconds),
        lambda: pair.client.connect(pair.server.address or "", timeout=seconds),
    ):
        with pytest.raises(InvalidArgumentError):
            call()


def test_cancelling_a_read(stalled: tuple[Pair, Any]) -> None:
    pair, _ = stalled
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    assert transfer.cancel() is TransferState.STOPPED
    assert transfer.settled
    with pytest.raises(TransferCancelledError):
        transfer.wait()
    assert isinstance(transfer.error, TransferCancelledError)
    before = bytes(pair.local)
    pair.local.release()
    assert before[: 1 << 16] == pattern(1 << 16)


def test_cancelling_a_write_waits_until_the_far_side_has_stopped(stalled: tuple[Pair, Any]) -> None:
    pair, network = stalled
    taken = network.taken_bytes
    transfer = pair.client.write(pair.peer, pair.local, pair.remote)
    # Bytes are on their way to the far side, which will write them when they come.
    assert eventually(lambda: network.taken_bytes > taken)
    with pytest.raises(WaitTimeoutError, match="still owns"):
        transfer.cancel(timeout=0.05)
    assert not transfer.settled
    with pytest.raises(RegionBusyError):
        pair.local.release()
    network.resume()
    assert transfer.cancel() in (TransferState.STOPPED, TransferState.COMPLETED)
    assert transfer.settled
    pair.local.release()


def test_closing_the_engine_ends_its_transfers(stalled: tuple[Pair, Any]) -> None:
    pair, _ = stalled
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            transfer.wait()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pair.client.close()
    thread.join()
    assert len(errors) == 1
    assert transfer.settled
    assert pair.local.released


def test_closing_the_peer_ends_its_transfers(stalled: tuple[Pair, Any]) -> None:
    pair, _ = stalled
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    pair.peer.close()
    with pytest.raises(ClosedError):
        transfer.wait()
    pair.client.allocate(64)


# -------------------------------------------------------------------- digests


@pytest.mark.parametrize("op", ["read", "write"])
def test_digests_of_every_item(pair: Pair, op: str) -> None:
    fill(pair.region)
    fill(pair.local, seed=1)
    offsets, lengths = np.array([0, 4096, 10_000]), np.array([1, 5904, 7])
    transfer = getattr(pair.client, op)(pair.peer, pair.local, pair.remote, offsets, offsets, lengths, digest=True)
    transfer.wait()
    memory = memoryview(pair.local)
    expected = [digest(memory[at : at + length]) for at, length in zip(offsets, lengths, strict=True)]
    assert transfer.digests is not None
    assert list(transfer.digests) == expected
    assert np.array(transfer.digests, dtype=np.uint64).tolist() == expected


def test_the_digest_of_a_large_item_is_that_of_its_bytes(open_pair: Any, transport: str) -> None:
    pair: Pair = open_pair(transport, nbytes=5 << 20, lanes=3)
    fill(pair.region)
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, 1, 2, (5 << 20) - 3, digest=True).wait()
    assert transfer.digests is not None
    assert transfer.digests[0] == digest(pattern(5 << 20)[2:-1])
