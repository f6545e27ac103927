# SPDX-License-Identifier: Apache-2.0
"""Proof that a caller knows the cluster secret, on every call. docs/decisions/0008-master.md says why it is so.

A caller puts 65 bytes into the metadata ``moonpool-auth-bin``: version, its channel (16 random bytes), a counter that
grows with each call over the channel, its clock in milliseconds, and HMAC-SHA256 over all of that and the method.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from moonpool.proto.errors import AuthenticationError
from moonpool.proto.tls import Tls

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["METADATA", "WINDOW_S", "Signer", "Verifier", "aio_channel", "channel"]

#: The key of the metadata.
METADATA: Final = "moonpool-auth-bin"
#: The longest that a proof is good for, which is also how far clocks may be apart, in seconds.
WINDOW_S: Final = 120.0
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<B16sQQ")
_PROOF_BYTES: Final = 32
# Calls over one channel overtake each other by no more than this.
_REORDER: Final = 4096
_CHANNELS_MAX: Final = 65_536


def _key(secret: bytes) -> bytes:
    # The engine proves the same secret to its peers in another way; neither proof may be of use to the other.
    return hmac.digest(secret, b"moonpool pool v1", hashlib.sha256)


class Signer:
    """Makes proofs for the calls of one channel. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self._key = _key(secret)
        self._channel = os.urandom(16)
        # next() on it is atomic.
        self._count = itertools.count(1)

    def sign(self, method: str) -> tuple[str, bytes]:
        """Return the pair of metadata for one call of `method`, such as ``"/moonpool.v1.Pool/Exists"``."""
        head = _HEAD.pack(_VERSION, self._channel, next(self._count), time.time_ns() // 1_000_000)
        return METADATA, head + hmac.digest(self._key, head + method.encode(), hashlib.sha256)


class _Channel:
    """The counters that were seen of one channel: the highest, and a bit for each of the `_REORDER` below it."""

    __slots__ = ("highest", "seen", "seen_ms")

    def __init__(self) -> None:
        self.highest = 0
        self.seen = 0
        self.seen_ms = 0

    def take(self, count: int) -> bool:
        """Return whether this counter comes for the first time."""
        ahead = count - self.highest
        if ahead > 0:
            self.seen = 1 if ahead > _REORDER else ((self.seen << ahead) | 1) & ((1 << _REORDER) - 1)
            self.highest = count
            return True
        bit = 1 << -ahead
        if -ahead >= _REORDER or self.seen & bit:
            return False
        self.seen |= bit
        return True


class Verifier:
    """Checks proofs. A proof is taken once, and not when it is older than `WINDOW_S`. Not thread-safe.

    Args:
        secret: the cluster's.
        clock: milliseconds since the epoch.
        channels_max: channels whose counters are remembered; beyond it those that were quiet for longer than the
            window go, and if there are none, new channels are refused.
    """

    def __init__(
        self,
        secret: bytes,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        channels_max: int = _CHANNELS_MAX,
    ) -> None:
        self._key = _key(secret)
        self._clock = clock
        self._channels_max = channels_max
        self._channels: OrderedDict[bytes, _Channel] = OrderedDict()

    def check(self, method: str, proof: bytes | str | None) -> None:
        """Check the proof that came with a call.

        Raises:
            AuthenticationError: there is none, or it is not of this secret, method and time, or came before.
        """
        if proof is None:
            raise AuthenticationError("the call carries no proof of the cluster secret", hint="set the secret")
        if not isinstance(proof, bytes) or len(proof) != _HEAD.size + _PROOF_BYTES or proof[0] != _VERSION:
            raise AuthenticationError("the proof of the cluster secret is malformed", hint="a client of this version")
        head = proof[: _HEAD.size]
        expected = hmac.digest(self._key, head + method.encode(), hashlib.sha256)
        # In constant time: how long it takes says nothing about the bytes.
        if not hmac.compare_digest(expected, proof[_HEAD.size :]):
            raise AuthenticationError("the caller has another cluster secret", hint="the same secret on every host")
        _, channel, count, sent_ms = _HEAD.unpack(head)
        now = self._clock()
        if abs(now - sent_ms) > WINDOW_S * 1000:
            raise AuthenticationError(
                f"the caller's clock is {abs(now - sent_ms) / 1000:.0f} s {'behind' if now > sent_ms else 'ahead'}",
                hint=f"set the clocks; they may be {WINDOW_S:.0f} s apart",
            )
        if not self._channel(channel, now).take(count):
            raise AuthenticationError("this proof was used before", hint="a fresh call")

    def _channel(self, name: bytes, now: int) -> _Channel:
        known = self._channels.get(name)
        if known is None:
            if len(self._channels) >= self._channels_max:
                oldest = next(iter(self._channels))
                # What it proved is out of date by now, so its counters protect nothing any more. A proof may come from
                # a clock that is ahead, and is then good for twice the window.
                if now - self._channels[oldest].seen_ms <= 2 * WINDOW_S * 1000:
                    raise AuthenticationError("too many clients at once", retryable=True, hint="try again later")
                del self._channels[oldest]
            known = self._channels[name] = _Channel()
        else:
            self._channels.move_to_end(name)
        known.seen_ms = now
        return known


class _Signed:
    """A call that is made with a proof. Of whichever kind, synchronous or of asyncio: all take metadata.

    gRPC's interceptors do the same, and cost about a tenth of a small call more.
    """

    def __init__(self, call: Any, method: str, signer: Signer) -> None:
        self._call = call
        self._method = method
        self._sign = signer.sign

    def __call__(self, request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
        return self._call(request, metadata=(*(metadata or ()), self._sign(self._method)), **options)

    def future(self, request: Any, *, metadata: Any = None, **options: Any) -> Any:
        return self._call.future(request, metadata=(*(metadata or ()), self._sign(self._method)), **options)

    def with_call(self, request: Any, *, metadata: Any = None, **options: Any) -> Any:
        return self._call.with_call(request, metadata=(*(metadata or ()), self._sign(self._method)), **options)


class _SigningCalls:
    """The four ways to make a call, for both kinds of channel."""

    _inner: Any
    _signer: Signer

    def unary_unary(self, method: str, *serializers: Any, **options: Any) -> Any:
        return _Signed(self._inner.unary_unary(method, *serializers, **options), method, self._signer)

    def unary_stream(self, method: str, *serializers: Any, **options: Any) -> Any:
        return _Signed(self._inner.unary_stream(method, *serializers, **options), method, self._signer)

    def stream_unary(self, method: str, *serializers: Any, **options: Any) -> Any:
        return _Signed(self._inner.stream_unary(method, *serializers, **options), method, self._signer)

    def stream_stream(self, method: str, *serializers: Any, **options: Any) -> Any:
        return _Signed(self._inner.stream_stream(method, *serializers, **options), method, self._signer)


class _SigningChannel(_SigningCalls, grpc.Channel):
    def __init__(self, inner: grpc.Channel, signer: Signer) -> None:
        self._inner = inner
        self._signer = signer

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        self._inner.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._inner.unsubscribe(callback)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AioSigningChannel(_SigningCalls, grpc.aio.Channel):
    def __init__(self, inner: grpc.aio.Channel, signer: Signer) -> None:
        self._inner = inner
        self._signer = signer

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state: grpc.ChannelConnectivity = self._inner.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# A restarted master must be found again in the time that a heartbeat may be late; the default waits up to two minutes.
# Messages are bounded by the master's settings.
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    # This is how long an attempt to connect may take: a host that is busy answers late, and TLS takes its time.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Channels of one process share connections otherwise, and the fate of one is that of the others.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment is for the web.
    ("grpc.enable_http_proxy", 0),
)


def channel(master: str, secret: bytes | None, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel to a master over which every call proves the secret, if there is one. Nothing is dialled yet.

    Raises:
        ConfigError: the files of `tls` cannot be used.
    """
    if tls is None:
        inner = grpc.insecure_channel(master, options=_OPTIONS)
    else:
        inner = grpc.secure_channel(master, tls.channel_credentials(), options=(*_OPTIONS, *tls.channel_options()))
    return inner if secret is None else _SigningChannel(inner, Signer(secret))


def aio_channel(master: str, secret: bytes | None) -> grpc.aio.Channel:
    """Return such a channel for asyncio. Call it where the event loop runs."""
    plain = grpc.aio.insecure_channel(master, options=_OPTIONS)
    return plain if secret is None else _AioSigningChannel(plain, Signer(secret))
