# SPDX-License-Identifier: Apache-2.0
"""What every call goes through: proof of the secret, parsing, the handler, metrics, errors as gRPC has them."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from moonpool.errors import MoonpoolError
from moonpool.master.errors import InvalidRequestError, LimitError, RemoteError
from moonpool.master.metrics import Metrics
from moonpool.master.packed import HASH_BYTES
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


class Calls:
    """Makes gRPC handlers out of functions from request to reply.

    Args:
        metrics: counts them.
        verifier: checks the proof of every call; None: there is no secret.
        check: raises where no call is to be answered.
    """

    def __init__(self, metrics: Metrics, verifier: auth.Verifier | None, check: Callable[[], None]) -> None:
        self._metrics = metrics
        self._verifier = verifier
        self._check = check

    def handlers(self, objects: list[object]) -> grpc.GenericRpcHandler:
        """Return the handlers of the whole service, from objects with a method for each call."""
        made = {}
        for rpc in _RPCS:
            handler = next(found for one in objects if (found := getattr(one, rpc.name, None)) is not None)
            request_type = getattr(pb, rpc.input_type.name)
            if rpc.server_streaming:
                made[rpc.name] = self._stream(rpc.name, handler, request_type, rpc.client_streaming)
            else:
                made[rpc.name] = self._unary(rpc.name, handler, request_type)
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _unary(
        self, name: str, handler: Callable[[Any], Any], request_type: type[Message]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        path, called = f"/{SERVICE}/{name}", self._metrics.called
        waits = inspect.iscoroutinefunction(handler)

        async def call(data: bytes, context: Any) -> bytes | None:
            began = time.perf_counter()
            try:
                self._admit(path, context)
                request = _parse(request_type, data)
                reply = await handler(request) if waits else handler(request)
                serialised: bytes = reply.SerializeToString()
            except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets an answer
                await self._refuse(name, error, context)
                return None
            called(name, time.perf_counter() - began, len(getattr(request, "hashes", b"")) // HASH_BYTES)
            return serialised

        # Requests are parsed here, since gRPC answers what it cannot parse with a traceback in the log.
        return grpc.unary_unary_rpc_method_handler(call, None, None)

    def _stream(
        self, name: str, handler: Callable[..., AsyncGenerator[Message, None]], request_type: type[Message], both: bool
    ) -> grpc.RpcMethodHandler[Any, Any]:
        path = f"/{SERVICE}/{name}"

        async def call(data: Any, context: Any) -> None:
            began = time.perf_counter()
            try:
                self._admit(path, context)
                request = _parse_each(request_type, data) if both else _parse(request_type, data)
                # Closed here and now, not when it is collected: a stream that ends lets go of its session.
                async with contextlib.aclosing(handler(request)) as replies:
                    async for reply in replies:
                        await context.write(reply.SerializeToString())
            except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets an answer
                await self._refuse(name, error, context)
                return
            self._metrics.called(name, time.perf_counter() - began, 0)

        make = grpc.stream_stream_rpc_method_handler if both else grpc.unary_stream_rpc_method_handler
        return make(call, None, None)

    def _admit(self, path: str, context: Any) -> None:
        if self._verifier is not None:
            found = next((value for key, value in context.invocation_metadata() or () if key == auth.METADATA), None)
            self._verifier.check(path, found)
        self._check()

    async def _refuse(self, name: str, error: Exception, context: Any) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, (ValueError, TypeError)) and not isinstance(error, MoonpoolError):
            # The index checks what it is given, and says so with these.
            error = InvalidRequestError(f"{name} makes no sense", cause=str(error))
        if isinstance(error, MemoryError) and not isinstance(error, MoonpoolError):
            error = LimitError(f"{name} found no memory", cause=str(error), retryable=True, hint="a smaller chunks_max")
        if not isinstance(error, MoonpoolError):
            _log.error("%s failed", name, exc_info=error)
            error = RemoteError(f"{name} failed", cause=f"{type(error).__name__}: {error}", hint="the master's log")
        self._metrics.refused(name, error.code)
        await context.abort(status_of(error), str(error)[:1000], trailer_of(error))


def _parse(request_type: type[Message], data: bytes) -> Any:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"this is no {request_type.__name__}", cause=str(error)) from error


async def _parse_each(request_type: type[Message], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield _parse(request_type, data)
