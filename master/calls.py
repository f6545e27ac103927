# SPDX-License-Identifier: Apache-2.0
"""What every call goes through: the secret, whether this master leads, parsing, metrics, errors as gRPC has them."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from moonpool.errors import MoonpoolError
from moonpool.master.errors import (
    InvalidRequestError,
    LimitError,
    MasterClosedError,
    NotLeaderError,
    RemoteError,
    StoreLostError,
    StoreUnavailableError,
)
from moonpool.master.metrics import Metrics
from moonpool.master.packed import HASH_BYTES
from moonpool.master.role import Role
from moonpool.master.store import MetadataStore
from moonpool.proto import auth
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import status_of, trailer_of

__all__ = ["SERVICE", "Calls", "methods"]

_log = logging.getLogger("moonpool.master")
SERVICE: Final = "moonpool.v1.Pool"
_RPCS: Final = pb.DESCRIPTOR.services_by_name["Pool"].methods


def methods() -> list[str]:
    """Return the names of every call of the service."""
    return [rpc.name for rpc in _RPCS]


@dataclass
class Duty:
    """A time in which this master leads.

    Attributes:
        metrics: of it.
        store: which it has open.
        methods: name of a call -> what carries it out, and whether that has to be awaited.
        over: whether it is over.
    """

    metrics: Metrics
    store: MetadataStore
    methods: dict[str, tuple[Callable[[Any], Any], bool]]
    over: bool = False


class Calls:
    """Makes gRPC handlers out of functions from request to reply, while this master leads.

    Args:
        verifier: checks the proof of every call; None: there is no secret.
        role: knows who leads while this master does not.
    """

    def __init__(self, verifier: auth.Verifier | None, role: Role) -> None:
        self._verifier = verifier
        self._role = role
        self._duty: Duty | None = None

    def lead(self, objects: list[object], metrics: Metrics, store: MetadataStore) -> None:
        """Carry out calls from now on.

        Args:
            objects: with a method for each call of the service.
            metrics: counts them.
            store: a reply is given only while nobody else can have it open.
        """
        found = {rpc.name: next(filter(None, (getattr(one, rpc.name, None) for one in objects))) for rpc in _RPCS}
        waits = {name: inspect.iscoroutinefunction(handler) for name, handler in found.items()}
        self._duty = Duty(metrics, store, {name: (handler, waits[name]) for name, handler in found.items()})

    def follow(self) -> None:
        """Carry out nothing from now on, and answer nothing more of what is under way."""
        if self._duty is not None:
            self._duty.over = True
        self._duty = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers of the whole service."""
        made = {}
        for rpc in _RPCS:
            request_type = getattr(pb, rpc.input_type.name)
            if rpc.server_streaming:
                made[rpc.name] = self._stream(rpc.name, request_type, rpc.client_streaming)
            else:
                made[rpc.name] = self._unary(rpc.name, request_type)
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _unary(self, name: str, request_type: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
        path = f"/{SERVICE}/{name}"

        async def call(data: bytes, context: Any) -> bytes | None:
            began, duty = time.monotonic(), self._duty
            try:
                self._admit(path, context)
                if duty is None:
                    raise self._not_leading()
                handler, waits = duty.methods[name]
                request = _parse(request_type, data)
                reply = await handler(request) if waits else handler(request)
                serialised: bytes = reply.SerializeToString()
                ended = time.monotonic()
                if duty.over or not duty.store.leading:
                    raise self._not_leading()
            except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets an answer
                await self._refuse(name, error, duty, context)
                return None
            duty.metrics.called(name, ended - began, len(getattr(request, "hashes", b"")) // HASH_BYTES)
            return serialised

        # Requests are parsed here, since gRPC answers what it cannot parse with a traceback in the log.
        return grpc.unary_unary_rpc_method_handler(call, None, None)

    def _stream(self, name: str, request_type: type[Message], both: bool) -> grpc.RpcMethodHandler[Any, Any]:
        path = f"/{SERVICE}/{name}"

        async def call(data: Any, context: Any) -> None:
            began, duty = time.monotonic(), self._duty
            try:
                self._admit(path, context)
                if duty is None:
                    raise self._not_leading()
                handler, _ = duty.methods[name]
                request = _parse_each(request_type, data) if both else _parse(request_type, data)
                # Closed here and now, not when it is collected: a stream that ends lets go of its session.
                async with contextlib.aclosing(handler(request)) as replies:
                    async for reply in replies:
                        if duty.over or not duty.store.leading:
                            raise self._not_leading()
                        await context.write(reply.SerializeToString())
            except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets an answer
                await self._refuse(name, error, duty, context)
                return
            duty.metrics.called(name, time.monotonic() - began, 0)

        make = grpc.stream_stream_rpc_method_handler if both else grpc.unary_stream_rpc_method_handler
        return make(call, None, None)

    def _admit(self, path: str, context: Any) -> None:
        if self._verifier is None:
            return
        found = next((value for key, value in context.invocation_metadata() or () if key == auth.METADATA), None)
        self._verifier.check(path, found)

    def _not_leading(self) -> NotLeaderError:
        leader = self._role.leader
        cause = f"{leader} does" if leader else "it is starting, or waits for its turn"
        if self._duty is not None:
            cause = "it cannot tell whether it still leads: the store has not answered for as long as its lease is"
        error = NotLeaderError(
            "this master does not lead",
            cause=cause,
            retryable=True,
            hint="every master of the cluster in the setting master, with commas between them",
        )
        error.leader = leader
        return error

    async def _refuse(self, name: str, error: Exception, duty: Duty | None, context: Any) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        over = duty is not None and duty.over
        taken = duty is not None and duty.store.shared and isinstance(error, StoreLostError)
        if taken or (over and isinstance(error, (StoreUnavailableError, MasterClosedError))):
            # What it met is that its time is over; the next leader knows what became of the call.
            error = self._not_leading()
        if isinstance(error, (ValueError, TypeError)) and not isinstance(error, MoonpoolError):
            # The index checks what it is given, and says so with these.
            error = InvalidRequestError(f"{name} makes no sense", cause=str(error))
        if isinstance(error, MemoryError) and not isinstance(error, MoonpoolError):
            error = LimitError(f"{name} found no memory", cause=str(error), retryable=True, hint="a smaller chunks_max")
        if not isinstance(error, MoonpoolError):
            _log.error("%s failed", name, exc_info=error)
            error = RemoteError(f"{name} failed", cause=f"{type(error).__name__}: {error}", hint="the master's log")
        if duty is not None:
            duty.metrics.refused(name, error.code)
        await context.abort(status_of(error), str(error)[:1000], trailer_of(error))


def _parse(request_type: type[Message], data: bytes) -> Any:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"this is no {request_type.__name__}", cause=str(error)) from error


async def _parse_each(request_type: type[Message], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield _parse(request_type, data)
