# SPDX-License-Identifier: Apache-2.0
"""The session with the master: one stream of heartbeats on a thread of its own, from the start to the end."""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import AuthenticationError, MasterUnavailableError, TlsError, from_rpc_error
from moonpool.store_client.rpc import MasterLink, leader_of

__all__ = ["Session"]

_log = logging.getLogger("moonpool.store_client")
_BACKOFF_FIRST: Final = 0.05
_BACKOFF_LAST: Final = 1.0
# Before the master has said how often it wants to hear from us.
_INTERVAL_FIRST: Final = 0.5
_GOODBYE_SECONDS: Final = 0.5
# Of one message about pins: a master takes 64 KiB at least. The second bound is for names of namespaces.
_HOLDING_BYTES: Final = 32 << 10
_HOLDING_PINS: Final = 64
# Between two looks at whether the master has refused for good.
_LOOK: Final = 0.02


class Session:
    """Keeps a session open and opens it again, with the same id, whenever the stream breaks.

    Args:
        link: to the master.
        kind: `pb.CLIENT` or `pb.NODE`.
        name: for people.
        host_id: what tells hosts apart.
        incarnation: of the transfer engine, 32 hexadecimal digits.
        roster: which sessions are told of each other, and what they are told of this one. None: of none.
        on_welcome: called on the session's thread after each Welcome. An exception ends the stream, which is opened
            again.
        on_fence: called on the session's thread; returns when the incarnation, given in hexadecimal, is cut off.
        on_probe: called on the session's thread; returns at once, and calls what it is given with the answer later.
        on_copy: called on the session's thread with what is to be copied, and what is to be called with the outcome.
            Nothing of what it was given before can write any more when `on_welcome` returns.
    """

    def __init__(
        self,
        link: MasterLink,
        kind: pb.SessionKind,
        name: str,
        host_id: str,
        incarnation: str,
        *,
        roster: tuple[str, bytes] | None = None,
        on_welcome: Callable[[Session], None] | None = None,
        on_fence: Callable[[str], None] | None = None,
        on_probe: Callable[[pb.Probe, Callable[[pb.ProbeDone], None]], None] | None = None,
        on_copy: Callable[[pb.Copy, Callable[[pb.CopyDone], None]], None] | None = None,
    ) -> None:
        self.id = link.session = os.urandom(16)
        self._link = link
        self._hello = pb.Hello(
            session=self.id, kind=kind, name=name, host_id=host_id, incarnation=bytes.fromhex(incarnation)
        )
        if roster is not None:
            self._hello.roster, self._hello.entry = roster
        #: What the others in the roster say of themselves, as of the last Welcome.
        self.entries: tuple[bytes, ...] = ()
        self._on_welcome = on_welcome
        self._on_fence = on_fence
        self._on_probe = on_probe
        self._on_copy = on_copy
        self._lock = threading.Lock()
        self._pins: dict[int, pb.HeldPin] = {}
        self._lost_pins: set[int] = set()
        self._outbox: queue.SimpleQueue[pb.HeartbeatRequest | None] = queue.SimpleQueue()
        self._interval = _INTERVAL_FIRST
        self._timeout = 10.0
        self._heard = time.monotonic()
        self._call: Any = None
        self._welcome = threading.Event()
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._failure: str = "no answer yet"
        self._refusal: MoonpoolError | None = None
        self.opened = 0
        self._thread = threading.Thread(target=self._run, name=f"moonpool-session-{name}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- for the owner

    def wait(self, timeout: float) -> None:
        """Wait until the master has opened the session.

        Raises:
            AuthenticationError: master and client do not have the same secret.
            TlsError: they do not agree on TLS.
            MasterUnavailableError: not in time.
        """
        deadline = time.monotonic() + timeout
        while not self._welcome.wait(min(_LOOK, max(0.0, deadline - time.monotonic()))):
            if isinstance(self._refusal, (AuthenticationError, TlsError)):
                raise self._refusal
            if time.monotonic() < deadline:
                continue
            raise MasterUnavailableError(
                f"no session with the master within {timeout:g}s",
                peer=self._link.address,
                cause=self._failure,
                retryable=True,
                hint="whether `moonpool master` runs at this address, with the same secret",
            )

    @property
    def alive(self) -> bool:
        """Whether the stream is open now."""
        return self._welcome.is_set()

    def hurry(self) -> None:
        """Open it again at once when it is not open: there is a master, and it does not know this session."""
        self._hurry.set()

    def hold(self, pin: int, namespace: str, hashes: bytes) -> None:
        """Name this pin to every master that does not know of it."""
        with self._lock:
            self._pins[pin] = pb.HeldPin(pin=pin, namespace=namespace, hashes=hashes)

    def let_go(self, pin: int) -> bool:
        """Forget a pin. False: it was not held."""
        with self._lock:
            self._lost_pins.discard(pin)
            return self._pins.pop(pin, None) is not None

    def lost(self, pin: int) -> bool:
        """Whether a master that was started anew had not all chunks of a pin any more."""
        with self._lock:
            return pin in self._lost_pins

    def close(self) -> None:
        """Say goodbye, as far as there is somebody to hear it, and end the thread."""
        self._closing.set()
        self._hurry.set()
        self._outbox.put(pb.HeartbeatRequest(goodbye=pb.Goodbye()))
        self._outbox.put(None)
        self._thread.join(_GOODBYE_SECONDS)
        if self._thread.is_alive():
            self._link.close()
            self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        delay = _BACKOFF_FIRST
        while not self._closing.is_set():
            welcomes, stub = self.opened, self._link.stub
            try:
                self._stream(stub)
                self._failure = "the master ended the stream"
            except grpc.RpcError as error:
                self._refusal = from_rpc_error(error, "the session could not be kept open", self._link.address)
                if isinstance(self._refusal, MasterUnavailableError) and not self.opened:
                    self._refusal = self._link.why_not() or self._refusal
                self._failure = str(self._refusal)
                if not isinstance(self._refusal, (AuthenticationError, TlsError)):
                    self._link.turn_from(stub, leader_of(self._refusal))
            except Exception as error:  # noqa: BLE001 - whatever the owner's callback met, the session goes on
                self._failure = f"{type(error).__name__}: {error}"
                _log.warning("session with %s: %s", self._link.address, self._failure)
            self._welcome.clear()
            if self._closing.is_set():
                return
            _log.info("session with %s is opened again: %s", self._link.address, self._failure)
            delay = _BACKOFF_FIRST if self.opened != welcomes else min(2 * delay, _BACKOFF_LAST)
            self._hurry.wait(delay * random.uniform(0.5, 1.0))
            self._hurry.clear()

    def _stream(self, stub: Any) -> None:
        outbox: queue.SimpleQueue[pb.HeartbeatRequest | None] = queue.SimpleQueue()
        with self._lock:
            hello = pb.Hello()
            hello.CopyFrom(self._hello)
            pins = list(self._pins.values())
        hello.more_pins = bool(pins)
        outbox.put(pb.HeartbeatRequest(hello=hello))
        for holding in _holdings(pins):
            outbox.put(pb.HeartbeatRequest(holding=holding))
        self._outbox = outbox
        if self._closing.is_set():  # close() may have put its goodbye into the queue before this one
            return
        self._heard = time.monotonic()
        replies = stub.Heartbeat(self._requests(outbox))
        self._call = replies
        try:
            for reply in replies:
                self._heard = time.monotonic()
                self._link.noticed(reply.header)
                self._take(reply, outbox)
        finally:
            replies.cancel()
            outbox.put(None)

    def _requests(self, outbox: queue.SimpleQueue[pb.HeartbeatRequest | None]) -> Iterator[pb.HeartbeatRequest]:
        # Runs on a thread of gRPC, which ends with the stream.
        while True:
            request: pb.HeartbeatRequest | None
            try:
                request = outbox.get(timeout=self._interval)
            except queue.Empty:
                request = pb.HeartbeatRequest()
                if time.monotonic() - self._heard > self._timeout and self._call is not None:
                    # Every message is answered. A host that went away without a word would hold the stream for ever.
                    self._failure = f"the master has not answered for {self._timeout:g}s"
                    self._call.cancel()
            if request is None:
                return
            yield request

    def _take(self, reply: pb.HeartbeatReply, outbox: queue.SimpleQueue[pb.HeartbeatRequest | None]) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "welcome":
            self._interval = max(0.01, reply.welcome.interval_ms / 1000)
            # Where others may lead meanwhile, a master that is silent is not waited for.
            patience = 0.0 if self._link.several else reply.welcome.session_timeout_ms / 1000
            self._timeout = max(3 * self._interval, patience)
            self.entries = tuple(reply.welcome.entries)
            with self._lock:
                lost = self._pins.keys() & set(reply.welcome.lost_pins)
                self._lost_pins |= lost
            if lost:
                _log.warning("master %s: chunks of %d pins are not there any more", self._link.address, len(lost))
            if self._on_welcome is not None:
                self._on_welcome(self)
            if self._on_copy is not None:
                outbox.put(pb.HeartbeatRequest(copies_over=pb.CopiesOver()))
            self.opened += 1
            self._welcome.set()
        elif kind == "fence" and self._on_fence is not None:
            self._on_fence(reply.fence.incarnation.hex())
            outbox.put(pb.HeartbeatRequest(fence_done=pb.FenceDone(fence=reply.fence.fence)))
        elif kind == "probe" and self._on_probe is not None:
            self._on_probe(reply.probe, lambda done: outbox.put(pb.HeartbeatRequest(probe_done=done)))
        elif kind == "copy" and self._on_copy is not None:
            # Over this stream or none: to another master the number may mean another copy.
            self._on_copy(reply.copy, lambda done: outbox.put(pb.HeartbeatRequest(copy_done=done)))


def _holdings(pins: list[pb.HeldPin]) -> Iterator[pb.Holding]:
    """Yield what is held in pieces that every master takes, whatever its bounds."""
    holding, size = pb.Holding(), 0
    for pin in pins:
        for begin in range(0, len(pin.hashes), _HOLDING_BYTES):
            piece = pin.hashes[begin : begin + _HOLDING_BYTES]
            if size + len(piece) > _HOLDING_BYTES or len(holding.pins) >= _HOLDING_PINS:
                yield holding
                holding, size = pb.Holding(), 0
            holding.pins.add(pin=pin.pin, namespace=pin.namespace, hashes=piece)
            size += len(piece)
    if pins:
        holding.last = True
        yield holding
