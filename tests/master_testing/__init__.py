# SPDX-License-Identifier: Apache-2.0
"""Clients and nodes of a master that speak its protocol and have no memory: what tests of the master need."""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from moonpool.proto import auth, pool_pb2_grpc
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import from_rpc_error

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Given", "Member", "call", "eventually", "generations", "hashes", "stub"]

SECONDS = 60.0


def stub(address: str, secret: bytes | None = None) -> tuple[grpc.Channel, Any]:
    channel = auth.channel(address, secret)
    return channel, pool_pb2_grpc.PoolStub(channel)


def call(method: Callable[..., Any], request: Any, timeout: float = SECONDS) -> Any:
    """Call, and raise what the master raised."""
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise from_rpc_error(error, "the call failed", "here") from error


def hashes(count: int) -> bytes:
    return os.urandom(32 * count)


def generations(extents: bytes, replicas: int = 1) -> bytes:
    return b"".join(extents[place : place + 8] for place in range(0, len(extents), 32 * replicas))


def eventually(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Wait until a condition holds and return what it returned."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


@dataclass
class Given:
    """What PutStart gave."""

    hashes: bytes
    statuses: bytes
    extents: bytes
    generations: bytes
    retry_after_ms: int


class Member:
    """A session: sends heartbeats from its own thread, and answers fences and copies unless told otherwise.

    Attributes:
        fences: that came.
        copies: that came.
        copied: the status of every extent of those that are answered at once.
    """

    def __init__(
        self,
        address: str,
        kind: int = pb.CLIENT,
        *,
        secret: bytes | None = None,
        host: str = "",
        session: bytes = b"",
        incarnation: bytes = b"",
        pins: tuple[pb.HeldPin, ...] = (),
        roster: tuple[str, bytes] = ("", b""),
        answers: bool = True,
        beats: bool = True,
        interval: float = 0.1,
    ) -> None:
        self.id = session or os.urandom(16)
        self.incarnation = incarnation or os.urandom(16)
        self.answers = answers
        self.beats = beats
        self.fences: list[pb.Fence] = []
        self.probes: list[pb.Probe] = []
        #: What it says of segments that it is to probe; None: nothing.
        self.reaches: bool | None = True
        self.copies: list[pb.Copy] = []
        self.copied = pb.OK
        #: What it says of its own extents that it is to look at.
        self.looked = pb.OK
        self.header = pb.Header()
        self._hello = pb.Hello(
            session=self.id, kind=kind, name=host or "member", host_id=host, incarnation=self.incarnation, pins=pins
        )
        self._hello.roster, self._hello.entry = roster
        self._outbox: queue.SimpleQueue[pb.HeartbeatRequest | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self.error: Exception | None = None
        self.channel_address = address
        self.channel, self.pool = stub(address, secret)
        self._outbox.put(pb.HeartbeatRequest(hello=self._hello))
        self._stream = self.pool.Heartbeat(self._messages(interval))
        try:
            first = next(self._stream)
        except grpc.RpcError as error:
            self._ended.set()
            self.channel.close()
            raise from_rpc_error(error, "no Welcome", address) from error
        assert first.WhichOneof("kind") == "welcome"
        self.header = first.header
        self.welcome = first.welcome
        if kind == pb.NODE:
            self._outbox.put(pb.HeartbeatRequest(copies_over=pb.CopiesOver()))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _messages(self, interval: float) -> Iterator[pb.HeartbeatRequest]:
        while not self._ended.is_set():
            try:
                message = self._outbox.get(timeout=interval)
            except queue.Empty:
                if self.beats:
                    yield pb.HeartbeatRequest()
                continue
            if message is None:
                return
            yield message

    def _read(self) -> None:
        try:
            for reply in self._stream:
                if reply.WhichOneof("kind") == "fence":
                    self.fences.append(reply.fence)
                    if self.answers:
                        self.answer(reply.fence)
                elif reply.WhichOneof("kind") == "probe":
                    self.probes.append(reply.probe)
                    if self.reaches is not None:
                        done = pb.ProbeDone(probe=reply.probe.probe, works=self.reaches, cause="a test")
                        self._outbox.put(pb.HeartbeatRequest(probe_done=done))
                elif reply.WhichOneof("kind") == "copy":
                    self.copies.append(reply.copy)
                    if self.answers:
                        own = reply.copy.source.segment == reply.copy.segment
                        self.copy_done(reply.copy, self.looked if own else self.copied)
        except grpc.RpcError as error:
            self.error = error
        self._ended.set()

    def answer(self, fence: pb.Fence) -> None:
        self._outbox.put(pb.HeartbeatRequest(fence_done=pb.FenceDone(fence=fence.fence)))

    def say(self, message: pb.HeartbeatRequest) -> None:
        self._outbox.put(message)

    def copy_done(self, copy: pb.Copy, status: int = pb.OK) -> None:
        statuses = bytes([status]) * (len(copy.extents) // 72)
        self._outbox.put(pb.HeartbeatRequest(copy_done=pb.CopyDone(copy=copy.copy, statuses=statuses, cause="a test")))

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def goodbye(self) -> None:
        self._outbox.put(pb.HeartbeatRequest(goodbye=pb.Goodbye()))
        assert self._ended.wait(SECONDS)
        self.vanish()

    def vanish(self) -> None:
        """Be gone, without a word."""
        self._ended.set()
        self._outbox.put(None)
        self._stream.cancel()
        self._thread.join()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.vanish()

    # ---------------------------------------------------------------- calls

    def mount(self, capacity: int, segment: int = 0, region: str = "pool") -> int:
        reply = call(
            self.pool.MountSegment,
            pb.MountSegmentRequest(
                session=self.id,
                address="127.0.0.1:1",
                region=region,
                incarnation=self.incarnation,
                capacity_bytes=capacity,
                segment=segment,
            ),
        )
        number: int = reply.segment
        return number

    def mount_disk(self, capacity: int, segment: int = 0, identity: bytes = b"d" * 16) -> int:
        request = pb.MountSegmentRequest(
            session=self.id,
            address="127.0.0.1:1",
            incarnation=identity,
            capacity_bytes=capacity,
            segment=segment,
            medium=pb.DISK,
        )
        number: int = call(self.pool.MountSegment, request).segment
        return number

    def start(self, chunks: bytes, length: int = 1000, namespace: str = "ns", **more: Any) -> Given:
        request = pb.PutStartRequest(
            session=self.id, namespace=namespace, hashes=chunks, lengths=struct.pack("<Q", length), **more
        )
        reply = call(self.pool.PutStart, request)
        return Given(
            chunks, reply.statuses, reply.extents, generations(reply.extents, reply.replicas), reply.retry_after_ms
        )

    def commit(self, given: Given, namespace: str = "ns", **more: Any) -> bytes:
        request = pb.PutCommitRequest(
            session=self.id, namespace=namespace, hashes=given.hashes, generations=given.generations, **more
        )
        statuses: bytes = call(self.pool.PutCommit, request).statuses
        return statuses

    def abort(self, given: Given, settled: bool, namespace: str = "ns") -> bytes:
        request = pb.PutAbortRequest(
            session=self.id, namespace=namespace, hashes=given.hashes, generations=given.generations, settled=settled
        )
        statuses: bytes = call(self.pool.PutAbort, request).statuses
        return statuses

    def put(self, chunks: bytes, length: int = 1000, namespace: str = "ns", **more: Any) -> bytes:
        """Put chunks and return the statuses of the commits; those that PutStart refused keep its status."""
        given = self.start(chunks, length, namespace, **more)
        good = [place for place, status in enumerate(given.statuses) if status == pb.OK]
        done = Given(
            b"".join(chunks[32 * place :][:32] for place in good),
            b"",
            b"",
            b"".join(given.generations[8 * place :][:8] for place in good),
            0,
        )
        committed = iter(self.commit(done, namespace)) if good else iter(())
        return bytes(next(committed) if status == pb.OK else status for status in given.statuses)

    def exists(self, chunks: bytes, namespace: str = "ns") -> bytes:
        statuses: bytes = call(self.pool.Exists, pb.ExistsRequest(namespace=namespace, hashes=chunks)).statuses
        return statuses

    def locate(self, chunks: bytes, lease_ms: int = 0, namespace: str = "ns", wait_ms: int = 0) -> Any:
        request = pb.LocateRequest(namespace=namespace, hashes=chunks, lease_ms=lease_ms, wait_ms=wait_ms)
        return call(self.pool.Locate, request)

    def pin(self, chunks: bytes, namespace: str = "ns") -> Any:
        return call(self.pool.Pin, pb.PinRequest(session=self.id, namespace=namespace, hashes=chunks))

    def unpin(self, pin: int) -> int:
        unpinned: int = call(self.pool.Unpin, pb.UnpinRequest(session=self.id, pin=pin)).unpinned
        return unpinned

    def remove(self, chunks: bytes, namespace: str = "ns") -> bytes:
        statuses: bytes = call(self.pool.Remove, pb.RemoveRequest(namespace=namespace, hashes=chunks)).statuses
        return statuses

    def move(self, chunks: bytes, segment: int, wait_ms: int = 10_000, namespace: str = "ns") -> bytes:
        request = pb.MoveRequest(namespace=namespace, hashes=chunks, segment=segment, wait_ms=wait_ms)
        statuses: bytes = call(self.pool.Move, request).statuses
        return statuses

    def drain(self, segment: int, undo: bool = False) -> pb.DrainReply:
        return call(self.pool.Drain, pb.DrainRequest(segment=segment, undo=undo))

    def where(self, chunks: bytes, namespace: str = "ns") -> list[int]:
        """The segment of the first replica of each."""
        reply = self.locate(chunks, namespace=namespace)
        step = 32 * reply.replicas
        return [int.from_bytes(reply.extents[at + 24 :][:4], "little") for at in range(0, len(reply.extents), step)]

    def report(self, segment: int, **spoilt: Any) -> None:
        request = pb.ReportFailureRequest(session=self.id, segment=segment, cause="a test", **spoilt)
        call(self.pool.ReportFailure, request)

    def segments(self) -> dict[int, pb.Segment]:
        reply = call(self.pool.ListSegments, pb.ListSegmentsRequest())
        return {segment.segment: segment for segment in reply.segments}

    def status(self) -> Any:
        import json

        return json.loads(call(self.pool.Stats, pb.StatsRequest()).json)
