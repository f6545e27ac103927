# SPDX-License-Identifier: Apache-2.0
"""Calls to the members of an etcd: each attempt has a deadline, and another member is asked after one that failed.

The messages and stubs are those of aetcd. Its client is not used, and why not is in docs/decisions/0009-etcd.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import grpc

from moonpool.errors import ConfigError
from moonpool.master.errors import StoreDamagedError, StoreUnavailableError
from moonpool.master.store.etcd.options import EtcdOptions

__all__ = ["Members", "RefusedError", "UnansweredError", "library"]

_log = logging.getLogger("moonpool.master")
# A page of records may be as large as the records are.
_RECEIVE_BYTES: Final = 256 << 20
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _RECEIVE_BYTES),
    # A member that comes back is wanted back before the lease is over.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # The connections of two stores in one process are not to be shared, or they would end together.
    ("grpc.use_local_subchannel_pool", 1),
)
# An attempt has longer after one that took too long, and less again with each answer, so that an etcd that is slow is
# not taken for one that is gone for ever.
_PATIENCE_MAX: Final = 8.0
_MORE_PATIENCE: Final = 1.5
_LESS_PATIENCE: Final = 0.9
_SOONER: Final = 0.5
# Between attempts that fail at once.
_PAUSE: Final = 0.05
# With these etcd says that it has not carried out what it was asked for. Any other may come after it was proposed.
_NOT_CARRIED_OUT: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class UnansweredError(Exception):
    """Whether it was carried out, or will be yet, is not known.

    Attributes:
        late: it took too long, rather than that nobody was there.
    """

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class RefusedError(Exception):
    """It was not carried out, and will not be.

    Attributes:
        code: of gRPC.
        text: what etcd said.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"{code.name.lower()}: {text}")
        self.code = code
        self.text = text

    @property
    def full(self) -> bool:
        """Whether the database is as large as it may be."""
        return "database space exceeded" in self.text

    @property
    def no_lease(self) -> bool:
        """Whether the lease that was named is over."""
        return "requested lease not found" in self.text

    @property
    def compacted(self) -> bool:
        """Whether the revision that was named is gone."""
        return "has been compacted" in self.text

    @property
    def busy(self) -> bool:
        """Whether the same may be taken in a moment."""
        return "too many requests" in self.text

    @property
    def stale_token(self) -> bool:
        """Whether a new proof of who asks may help."""
        return (
            self.code is grpc.StatusCode.UNAUTHENTICATED
            or "invalid auth token" in self.text
            or "revision of auth store is old" in self.text
            or "user name is empty" in self.text
        )


def library() -> Any:
    """Return the module with etcd's messages and stubs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        # Late: who keeps metadata in a file needs no etcd.
        from aetcd import rpc
    except ImportError as error:
        raise ConfigError(
            "metadata in etcd needs the package aetcd", cause=str(error), hint="pip install 'moonpool[etcd]'"
        ) from error
    return rpc


class _Member:
    def __init__(self, address: str, options: EtcdOptions, credentials: grpc.ChannelCredentials | None) -> None:
        rpc = library()
        self.address = address
        # Not grpc.aio: two event loops in one process share its one queue of completions and wake each other for
        # every call of either.
        if credentials is None:
            self.channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(address, credentials, _CHANNEL_OPTIONS)
        kv, lease = rpc.KVStub(self.channel), rpc.LeaseStub(self.channel)
        upkeep, auth = rpc.MaintenanceStub(self.channel), rpc.AuthStub(self.channel)
        self.methods: dict[str, Any] = {
            "Range": kv.Range,
            "Txn": kv.Txn,
            "Compact": kv.Compact,
            "LeaseGrant": lease.LeaseGrant,
            "LeaseRevoke": lease.LeaseRevoke,
            "LeaseTimeToLive": lease.LeaseTimeToLive,
            # A stream in which one message goes each way, which on the wire is a call like the others.
            "LeaseKeepAlive": self.channel.unary_unary(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
            ),
            "Status": upkeep.Status,
            "Alarm": upkeep.Alarm,
            "Defragment": upkeep.Defragment,
            "Authenticate": auth.Authenticate,
        }
        self.watch = rpc.WatchStub(self.channel).Watch


class Members:
    """The members of an etcd, of which one is asked until it fails. Used from one event loop.

    Args:
        options: where they are.

    Attributes:
        rpc: the module with the messages.
        unanswered: attempts to which no answer came.
        revision: the highest of the store that was seen.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self.rpc = library()
        self.unanswered = 0
        self.revision = 0
        self._options = options
        credentials = options.credentials()
        self._members = [_Member(str(address), options, credentials) for address in options.endpoints]
        self._current = 0
        self._failed_in_a_row = 0
        self._patience = options.timeout
        self._token: tuple[tuple[str, str], ...] | None = None
        self._authenticating = asyncio.Lock()
        self._etcd_cluster = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def etcd_cluster(self) -> int:
        """The number of the etcd cluster that answered first."""
        return self._etcd_cluster

    async def attempt(self, method: str, request: Any) -> Any:
        """Ask one member once. Whatever is asked twice has to be safe to be carried out twice, also late.

        Raises:
            UnansweredError: no answer came in time, or one that leaves open what came of it.
            RefusedError: it was not carried out.
            StoreDamagedError: what answers is not the store of before.
        """
        return await self._attempt(method, request, [self._current])

    async def attempt_anywhere(self, method: str, request: Any) -> Any:
        """As `attempt`, but ask every member at once where the last one did not answer, and take the first answer.

        A member that stands still does not say so, and after the end of a leader the others lose what they are asked
        until they have agreed on another one: so this asks again sooner, and whoever is first answers.
        """
        if not self._failed_in_a_row:
            return await self.attempt(method, request)
        return await self._attempt(method, request, range(len(self._members)), _SOONER)

    async def _attempt(self, method: str, request: Any, numbers: Sequence[int], part: float = 1.0) -> Any:
        timeout, floor = self._patience * part, self.revision
        calls: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(self._with_token(number, method, request, timeout)): number for number in numbers
        }
        try:
            first, error = await self._first_answer(calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if first is None:
            self._unanswered(method, numbers, error)
            raise error
        self._current = calls[first]
        self._patience = max(self._options.timeout, self._patience * _LESS_PATIENCE)
        if self._failed_in_a_row:
            _log.warning("etcd: %s answers, after %d attempts", self.address(self._current), self._failed_in_a_row)
            self._failed_in_a_row = 0
        reply = first.result()
        self._check(reply.header, floor)
        return reply

    @staticmethod
    async def _first_answer(
        calls: Collection[asyncio.Future[Any]],
    ) -> tuple[asyncio.Future[Any] | None, UnansweredError]:
        error = UnansweredError("nobody was asked")
        waiting = set(calls)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                failure = call.exception()
                if not isinstance(failure, UnansweredError):
                    return call, error
                error = failure
        return None, error

    def _unanswered(self, method: str, numbers: Sequence[int], error: UnansweredError) -> None:
        self.unanswered += 1
        if error.late:
            self._patience = min(self._patience * _MORE_PATIENCE, max(_PATIENCE_MAX, self._options.timeout))
        if not self._failed_in_a_row:
            _log.warning("etcd: no answer to %s: %s", method, error)
        self._failed_in_a_row += 1
        if len(numbers) == 1:
            self.avoid(numbers[0])

    async def ask(self, method: str, request: Any, seconds: float) -> Any:
        """Ask until somebody answers.

        Raises:
            StoreUnavailableError: nobody did in `seconds`.
            RefusedError: it was not carried out.
        """
        end = time.monotonic() + seconds
        while True:
            last = time.monotonic() >= end
            try:
                return await self.attempt(method, request)
            except UnansweredError as error:
                if last:
                    raise StoreUnavailableError(
                        f"etcd did not answer in {seconds:g} s",
                        peer=self.addresses,
                        cause=str(error),
                        retryable=True,
                        hint="see that a majority of its members runs and can be reached",
                    ) from error
                await self.pause()

    async def ask_member(self, number: int, method: str, request: Any, timeout: float) -> Any:
        """Ask this member, once. Raises as `attempt`."""
        return await self._with_token(number, method, request, timeout)

    async def pause(self) -> None:
        """Wait a moment after an attempt that failed."""
        await asyncio.sleep(_PAUSE)

    def avoid(self, number: int) -> None:
        """Ask another member from now on, if there is one."""
        if self._current == number:
            self._current = (number + 1) % len(self._members)

    def watch(self, requests: Iterator[Any]) -> Any:
        """Open a stream of changes from the member that answered last, as who asked it; not a coroutine."""
        return self._members[self._current].watch(requests, metadata=self._token)

    @property
    def current(self) -> int:
        """The member that is asked next."""
        return self._current

    @property
    def addresses(self) -> str:
        """Of all members, for people."""
        return ", ".join(member.address for member in self._members)

    def address(self, number: int) -> str:
        """Of one member."""
        return self._members[number].address

    def close(self) -> None:
        """End every connection."""
        for member in self._members:
            member.channel.close()

    # ---------------------------------------------------------------- one attempt

    def _check(self, header: Any, floor: int) -> None:
        """A store that was set back has lost what this process knows to be durable."""
        if not header.revision:
            return  # of a call that is not about keys
        if self._etcd_cluster and header.cluster_id != self._etcd_cluster:
            raise StoreDamagedError(
                "another etcd answers now", peer=self.addresses, cause=f"its cluster id is {header.cluster_id:x}"
            )
        if header.revision < floor:
            raise StoreDamagedError(
                "etcd has been set back to an old snapshot",
                peer=self.addresses,
                cause=f"its revision is {header.revision}, and was {floor}",
                hint="see docs/master.md on snapshots",
            )
        self._etcd_cluster = header.cluster_id
        self.revision = max(self.revision, header.revision)

    async def _with_token(self, number: int, method: str, request: Any, timeout: float) -> Any:
        if self._options.user is None:
            return await self._once(number, method, request, timeout)
        for fresh in (False, True):
            token = self._token
            if token is None:
                token = await self._authenticate(number, timeout, token)
            try:
                return await self._once(number, method, request, timeout, token)
            except RefusedError as error:
                if fresh or not error.stale_token:
                    raise
                await self._authenticate(number, timeout, token)
        raise AssertionError("unreachable")

    async def _authenticate(self, number: int, timeout: float, stale: Any) -> tuple[tuple[str, str], ...]:
        async with self._authenticating:
            if self._token is None or self._token == stale:
                assert self._options.password is not None
                request = self.rpc.AuthenticateRequest(
                    name=self._options.user, password=self._options.password.decode(errors="replace")
                )
                reply = await self._once(number, "Authenticate", request, timeout)
                self._token = (("token", reply.token),)
            return self._token

    async def _once(self, number: int, method: str, request: Any, timeout: float, token: Any = None) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        call = self._members[number].methods[method].future(request, timeout=timeout, metadata=token)
        call.add_done_callback(_waker(loop, done))
        try:
            await done
        finally:
            call.cancel()
        if call.code() is grpc.StatusCode.OK:
            return call.result()
        text = f"{self._members[number].address}: {call.details()}"
        # What concerns the whole etcd and not keys is denied with a code that says nothing.
        if call.code() in _NOT_CARRIED_OUT or "permission denied" in text:
            raise RefusedError(call.code(), text)
        late = call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        raise UnansweredError(f"{text} ({call.code().name.lower()})", late=late)


def _waker(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> Callable[[Any], None]:
    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def wake(_: Any) -> None:
        # A call that was given up ends after the loop, when its channel is closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish)

    return wake
