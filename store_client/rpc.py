# SPDX-License-Identifier: Apache-2.0
"""Calls to the master: made again while it does not answer, by one of several that leads, and every reply looked at."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import grpc

from moonpool.address import parse_addresses
from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb
from moonpool.proto import pool_pb2_grpc
from moonpool.proto.auth import channel
from moonpool.proto.errors import (
    CallDeadlineError,
    MasterClosedError,
    MasterUnavailableError,
    NotLeaderError,
    TlsError,
    from_rpc_error,
)
from moonpool.proto.tls import Tls, why_not
from moonpool.store_client.errors import ClientClosedError

__all__ = ["MasterIdentity", "MasterLink", "last_wait", "leader_of"]

_log = logging.getLogger("moonpool.store_client")
# Between two attempts of a call: from the first to the last, doubled each time, with up to a half of jitter.
_BACKOFF_FIRST: Final = 0.01
_BACKOFF_LAST: Final = 0.5
# One attempt may take so long before another is made: a connection can be dead without anybody noticing.
_ATTEMPT_SECONDS: Final = 5.0
_WHY_SECONDS: Final = 0.5
# Of the time of a call that the master is to wait in, what is left for its answer and for what follows that.
_FOR_ANSWER: Final = 0.25


def leader_of(error: MoonpoolError) -> str:
    """Return who leads, as far as an error says it."""
    return error.leader if isinstance(error, NotLeaderError) else ""


def last_wait(deadline: float) -> float:
    """Return until when the master may be told to wait, so that its answer comes before the deadline of a call."""
    return deadline - _FOR_ANSWER * max(0.0, deadline - time.monotonic())


@dataclass(frozen=True)
class MasterIdentity:
    """Which master answered last.

    Attributes:
        cluster_id: 32 hexadecimal digits.
        boot_id: another one after every start of a master.
        epoch: of the leader; grows.
    """

    cluster_id: str
    boot_id: str
    epoch: int

    @classmethod
    def of(cls, header: pb.Header) -> MasterIdentity:
        """Return the master that has sent this."""
        return cls(header.cluster_id.hex(), header.boot_id.hex(), header.epoch)


class MasterLink:
    """A channel to the master, or to the one of several masters that leads. Thread-safe.

    There is one channel at a time. Whoever finds that the master behind it does not lead, or does not answer, has it
    replaced by one to the leader, or to the next master where nobody says who leads; calls that are under way over the
    old one end then, and are made again.

    Args:
        masters: address of the master, or of several with commas between them.
        secret: of the cluster.
        tls: of this caller.

    Raises:
        AddressError: `masters` are no addresses.
        ConfigError: the files of `tls` cannot be used.
    """

    def __init__(self, masters: str, secret: bytes | None, tls: Tls | None = None) -> None:
        self._masters = [str(address) for address in parse_addresses(masters)]
        self._secret = secret
        self._tls = tls
        self._lock = threading.Lock()
        self._turn = 0
        self.address = self._masters[0]
        self._channel, self.stub = self._open()
        self._identity: MasterIdentity | None = None
        self._closed = threading.Event()
        #: Of the session that this channel belongs to.
        self.session = b""
        self.retries = 0
        self.restarts_seen = 0

    def _open(self) -> tuple[grpc.Channel, Any]:
        opened = channel(self.address, self._secret, self._tls)
        return opened, pool_pb2_grpc.PoolStub(opened)  # type: ignore[no-untyped-call]  # generated

    @property
    def several(self) -> bool:
        """Whether there is more than one master."""
        return self._masters != [self.address]

    def turn_from(self, stub: Any, leader: str = "") -> None:
        """Go to another master, if `stub` is still that of the current one.

        Args:
            stub: of the master that does not answer, or does not lead.
            leader: who leads, as it says; empty when nobody knows.
        """
        with self._lock:
            if stub is not self.stub or self._closed.is_set():
                return
            if not leader:
                self._turn += 1
                leader = self._masters[self._turn % len(self._masters)]
            if leader == self.address:
                return
            _log.info("master %s is asked instead of %s", leader, self.address)
            self.address = leader
            old = self._channel
            self._channel, self.stub = self._open()
        old.close()

    @property
    def identity(self) -> MasterIdentity | None:
        """Which master answered last; None before the first answer."""
        return self._identity

    @property
    def cluster(self) -> str:
        """The cluster of the master that answered last, 32 hexadecimal digits; empty before the first answer."""
        identity = self._identity
        return "" if identity is None else identity.cluster_id

    def call(self, method: str, request: Any, deadline: float) -> Any:
        """Call the master and return its reply. Every call of this protocol may be made again.

        Args:
            method: its name in the service.
            request: its message.
            deadline: of `time.monotonic`; until then it is tried again while the master does not answer.

        Raises:
            MasterUnavailableError: no answer in time.
            ClientClosedError: the client was closed.
            MoonpoolError: the master refused; the code is its own.
        """
        delay = _BACKOFF_FIRST
        self._name(request)
        while True:
            if self._closed.is_set():
                raise ClientClosedError("the client is closed")
            remaining, stub = deadline - time.monotonic(), self.stub
            try:
                reply = getattr(stub, method)(
                    request,
                    timeout=max(0.001, min(remaining, _ATTEMPT_SECONDS)),
                    # Of several, the next is asked at once instead.
                    wait_for_ready=not self.several,
                )
            except grpc.RpcError as error:
                failure = self._failure(method, error, stub)
                if not isinstance(failure, MasterUnavailableError):
                    raise failure from error
                if deadline - time.monotonic() <= delay:
                    raise (self.why_not() or failure) from error
                self.turn_from(stub, leader_of(failure))
            except ValueError as error:  # the channel was closed by another thread
                if self._closed.is_set():
                    raise ClientClosedError("the client is closed", cause=str(error)) from error
            else:
                self.noticed(reply.header)
                return reply
            self.retries += 1
            self._closed.wait(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, _BACKOFF_LAST)

    def why_not(self) -> TlsError | None:
        """Return why a master that cannot be reached cannot be, if that is for TLS. It asks the network."""
        return why_not(self.address, self._tls, _WHY_SECONDS)

    def _name(self, request: Any) -> None:
        """Give a request its id, by which the master knows it when it is made again."""
        if "request" in request.DESCRIPTOR.fields_by_name and not request.request:
            request.request = os.urandom(16)
            request.session = request.session or self.session

    def noticed(self, header: pb.Header) -> None:
        """Remember who answered."""
        identity = MasterIdentity.of(header)
        with self._lock:
            before = self._identity
            if before == identity:
                return
            self._identity = identity
        if before is None:
            return
        self.restarts_seen += 1
        _log.warning("master %s: %s answers now, before it was %s", self.address, identity, before)

    def refuse(self) -> None:
        """Refuse further calls."""
        self._closed.set()

    def close(self) -> None:
        """Refuse further calls, and end those that run."""
        self._closed.set()
        with self._lock:
            current = self._channel
        current.close()

    def _failure(self, method: str, error: grpc.RpcError, stub: Any) -> MoonpoolError:
        if self._closed.is_set():
            return ClientClosedError("the client is closed")
        failure = from_rpc_error(error, f"{method} failed", self.address)
        turned = stub is not self.stub and error.code() is grpc.StatusCode.CANCELLED
        if turned or isinstance(failure, (CallDeadlineError, MasterClosedError)):
            return MasterUnavailableError(
                failure.message, peer=failure.peer, cause=failure.cause, retryable=True, hint=failure.hint
            )
        return failure
