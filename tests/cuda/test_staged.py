# SPDX-License-Identifier: Apache-2.0
"""Transfers whose memory is a GPU's on either side, or on both, over paths that move memory of the host."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cuda_testing.ends import SIZE, Connect, content, wait_until
from fake_cuda import FakeCuda

from moonpool.transfer_engine import (
    BatchError,
    InvalidArgumentError,
    PeerLostError,
    RegionReleasedError,
    Status,
    TransferState,
    WaitTimeoutError,
    digest,
)

PATHS = ["tcp", "local,tcp", "shm,tcp"]
SIDES = ["dh", "hd", "dd"]


def copies_begun(cuda: FakeCuda) -> int:
    """Return by how many calls, since they were forgotten, copies were begun."""
    calls = ("cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyBatchAsync", "cuLaunchKernel")
    return sum(map(cuda.calls, calls))


@pytest.mark.parametrize("transports", PATHS)
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("with_digest", [False, True])
def test_every_byte_arrives_in_both_directions(
    connect: Connect, transports: str, sides: str, with_digest: bool
) -> None:
    ends = connect(sides, transports)
    transfer = ends.engine.write(ends.peer, ends.here.region, ends.remote, digest=with_digest, notify=b"there")
    transfer.wait(30)
    assert ends.there.peek() == content(1).tobytes() == ends.here.peek()
    (notification,) = ends.server.notifications(10)
    assert notification.payload == b"there"
    if with_digest:
        digests = transfer.digests
        assert digests is not None
        assert list(digests) == [digest(content(1))]
    ends.there.poke(content(3))
    ends.engine.read(ends.peer, ends.here.region, ends.remote, digest=with_digest).wait(30)
    assert ends.here.peek() == content(3).tobytes() == ends.there.peek()


@pytest.mark.parametrize("sides", SIDES)
def test_scattered_pieces_go_where_they_belong(connect: Connect, sides: str) -> None:
    ends = connect(sides)
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 3000, 1500)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) + rng.integers(0, 9)
    order = rng.permutation(1500)
    origins = np.empty(1500, np.int64)
    origins[order] = np.concatenate([[0], np.cumsum(lengths[order])[:-1]])
    ends.engine.read(ends.peer, ends.here.region, ends.remote, starts, origins, lengths).wait(30)
    expected, source = content(1), content(2)
    for start, origin, length in zip(starts, origins, lengths, strict=True):
        expected[start : start + length] = source[origin : origin + length]
    assert ends.here.peek() == expected.tobytes()
    plan = ends.engine.prepare(ends.peer, ends.here.region, ends.remote, starts, origins, lengths)
    ends.there.poke(content(3))
    ends.engine.post(plan, op="write").wait(30)
    source[lengths.sum() :] = content(3)[lengths.sum() :]
    assert ends.there.peek() == source.tobytes()


def test_one_batch_has_memory_of_both_kinds(cuda: FakeCuda, connect: Connect) -> None:
    ends = connect("dd")
    head = ends.engine.allocate(64)
    half = SIZE // 2
    ends.engine.read(ends.peer, ([head, ends.here.region], [0, 1]), ends.remote, [0, 10], [0, 64], [64, half]).wait(30)
    assert bytes(head) == content(2)[:64].tobytes()
    assert ends.here.peek()[10 : 10 + half] == content(2)[64 : 64 + half].tobytes()
    assert ends.here.peek()[:10] == content(1)[:10].tobytes()


def test_bad_items_do_not_hinder_the_others(connect: Connect) -> None:
    ends = connect("dh")
    with pytest.raises(BatchError) as failed:
        ends.engine.write(
            ends.peer, ends.here.region, ends.remote, [0, SIZE, 100], [0, 0, 100], [100, 1, SIZE - 100]
        ).wait(30)
    assert list(failed.value.statuses) == [Status.OK, Status.OUT_OF_RANGE, Status.OK]
    assert ends.there.peek() == content(1).tobytes()


@pytest.mark.parametrize("sides", SIDES)
def test_little_pinned_memory_is_enough(connect: Connect, cuda: FakeCuda, sides: str) -> None:
    nbytes = 24 << 20
    ends = connect(sides, nbytes=nbytes, cuda_staging_bytes="4MiB")
    transfers = [
        ends.engine.write(ends.peer, ends.here.region, ends.remote, start, start, nbytes // 6)
        for start in range(0, nbytes, nbytes // 6)
    ]
    # Engines that wait for each other's pinned memory.
    back = ends.server.register(bytearray(1 << 20))
    for transfer in transfers:
        transfer.wait(60)
    assert ends.there.peek() == content(1, nbytes).tobytes()
    assert cuda.alive("pinned") <= 2
    back.release()


@pytest.mark.parametrize("sides", SIDES)
def test_driver_calls_do_not_grow_with_the_pieces(connect: Connect, cuda: FakeCuda, sides: str) -> None:
    ends = connect(sides)
    calls: list[dict[str, int]] = []
    for pieces in (100, 1000):
        starts = np.arange(pieces) * 1024
        cuda.forget_calls()
        ends.engine.read(ends.peer, ends.here.region, ends.remote, starts, starts, 100_000 // pieces).wait(30)
        # The stager looks for the end of a copy as often as it takes; what is counted is what it asks for.
        calls.append({name: cuda.calls(name) for name in ("cuEventRecord", "cuPointerGetAttributes")})
        assert copies_begun(cuda) == len(sides.replace("h", ""))
    assert calls[0] == calls[1]


def test_a_driver_without_batches_joins_what_is_contiguous(connect: Connect, cuda: FakeCuda) -> None:
    ends = connect("dh")
    cuda.set("fail=cuMemcpyBatchAsync:1:801")
    starts = np.arange(64) * 1000
    ends.engine.write(ends.peer, ends.here.region, ends.remote, starts, starts[::-1].copy(), 1000).wait(30)
    expected = content(2)
    expected[:64_000] = content(1)[:64_000].reshape(64, 1000)[::-1].ravel()
    assert ends.there.peek() == expected.tobytes()


# -------------------------------------------------------------------- streams


@pytest.mark.parametrize("op", ["read", "write"])
def test_nothing_moves_before_the_stream_has_got_there(connect: Connect, cuda: FakeCuda, op: str) -> None:
    ends = connect("dh")
    stream = cuda.stream()
    start = ends.engine.write if op == "write" else ends.engine.read
    with cuda.held():
        # What the caller queued is not done when the transfer is submitted.
        cuda.call("cuMemsetD8Async", ends.here.memory.address, 7, SIZE, stream)
        transfer = start(ends.peer, ends.here.region, ends.remote, stream=stream)
        with pytest.raises(WaitTimeoutError):
            transfer.wait(0.2)
        assert ends.there.peek() == content(2).tobytes()
    transfer.wait(30)
    expected = bytes([7]) * SIZE if op == "write" else content(2).tobytes()
    assert ends.there.peek() == expected == ends.here.peek()
    cuda.call("cuStreamDestroy_v2", stream)


def test_others_do_not_wait_for_a_stream(connect: Connect, cuda: FakeCuda) -> None:
    ends = connect("dh")
    stream = cuda.stream()
    cuda.set("ns_per_kib=200000")  # a second for all of it, a millisecond for the others
    cuda.call("cuMemsetD8Async", ends.here.memory.address, 7, SIZE, stream)
    behind = ends.engine.write(ends.peer, ends.here.region, ends.remote, 0, 0, 1000, stream=type("S", (), {
        "cuda_stream": stream})())  # fmt: skip
    ends.engine.write(ends.peer, ends.here.region, ends.remote, 5000, 5000, 5000).wait(30)
    assert not behind.done()
    behind.wait(30)
    assert ends.there.peek()[:1000] == bytes([7]) * 1000
    cuda.call("cuStreamDestroy_v2", stream)


def test_a_transfer_behind_a_stream_can_be_stopped(connect: Connect, cuda: FakeCuda) -> None:
    ends = connect("dh")
    stream = cuda.stream()
    with cuda.held():
        cuda.call("cuMemsetD8Async", ends.here.memory.address, 7, 1000, stream)
        transfer = ends.engine.read(ends.peer, ends.here.region, ends.remote, stream=stream)
        assert transfer.cancel(10) is TransferState.STOPPED
        late = ends.engine.read(ends.peer, ends.here.region, ends.remote, stream=stream, deadline=0.05)
        assert late.cancel(10) in (TransferState.EXPIRED, TransferState.STOPPED)
    assert ends.here.peek()[1000:] == content(1)[1000:].tobytes()
    cuda.call("cuStreamSynchronize", stream)
    cuda.call("cuStreamDestroy_v2", stream)


def test_a_stream_needs_memory_of_its_gpu(connect: Connect) -> None:
    ends = connect("hd")
    with pytest.raises(InvalidArgumentError, match="no local region is memory of a GPU"):
        ends.engine.write(ends.peer, ends.here.region, ends.remote, stream=0)


# -------------------------------------------------------------------- stopping


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_transfer_that_was_stopped_ends_when_nothing_can_write_any_more(
    connect: Connect, cuda: FakeCuda, how: str
) -> None:
    ends = connect("dh")
    cuda.forget_calls()
    with cuda.held():
        deadline = 0.3 if how == "deadline" else None
        transfer = ends.engine.read(ends.peer, ends.here.region, ends.remote, deadline=deadline)
        # The bytes have come from the peer, and the copies to the device are held.
        wait_until(lambda: copies_begun(cuda) > 0)
        with pytest.raises(WaitTimeoutError):
            transfer.cancel(0.5)
        assert transfer.state is TransferState.UNSETTLED
    # All of it may have come before it was stopped, and is in place then.
    assert transfer.cancel(10) in (TransferState.STOPPED, TransferState.EXPIRED, TransferState.COMPLETED)
    then = ends.here.peek()
    ends.engine.write(ends.peer, ends.here.region, ends.remote).wait(30)
    assert ends.here.peek() == then


@pytest.mark.parametrize("sides", ["dh", "dd"])
def test_nothing_of_a_transfer_comes_after_a_fence(connect: Connect, cuda: FakeCuda, sides: str) -> None:
    ends = connect(sides, nbytes=40 << 20)
    before = ends.there.peek()
    cuda.set("ns_per_kib=20000")
    writing = ends.engine.write(ends.peer, ends.here.region, ends.remote)
    # Most of it has not begun, and the engine is to connect again by itself, for the next transfer.
    wait_until(lambda: ends.there.peek() != before)
    assert ends.server.fence(ends.engine.incarnation) == 1
    fenced = ends.there.peek()
    with pytest.raises(PeerLostError):
        writing.wait(30)
    assert ends.there.peek() == fenced
    cuda.set("ns_per_kib=0")
    ends.engine.write(ends.peer, ends.here.region, ends.remote).wait(30)
    assert ends.there.peek() == ends.here.peek()


def test_releasing_waits_for_copies_of_peers(connect: Connect, cuda: FakeCuda) -> None:
    ends = connect("hd", nbytes=24 << 20, cuda_staging_bytes="4MiB")
    released = threading.Event()
    cuda.forget_calls()

    def release() -> None:
        ends.there.region.release()
        released.set()

    with cuda.held():
        transfer = ends.engine.write(ends.peer, ends.here.region, ends.remote)
        wait_until(lambda: copies_begun(cuda) > 0)
        thread = threading.Thread(target=release)
        thread.start()
        assert not released.wait(0.2)
    thread.join(30)
    then = ends.there.peek()
    with pytest.raises(RegionReleasedError):
        transfer.wait(30)
    assert ends.there.peek() == then
