# SPDX-License-Identifier: Apache-2.0
"""The other side as the initiating process sees it: in this process, a child, or on another host."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import IO, Any, Final

from moonpool.address import Address
from moonpool.bench import control
from moonpool.bench.backends import Place
from moonpool.bench.errors import ControlError, ExitStatus
from moonpool.bench.session import TargetSession

__all__ = ["InProcessTarget", "RemoteTarget", "SpawnedTarget", "Target"]

_START_S: Final = 60.0
_CONNECT_S: Final = 5.0
_GOODBYE_S: Final = 5.0


class Target(ABC):
    """Carries commands to a `TargetSession`."""

    @abstractmethod
    def start(self, name: str, timeout: float = 30.0, **arguments: Any) -> Callable[[], Any]:
        """Begin a command; calling the result waits for its answer.

        Raises:
            TargetError: the target reports a failure.
            ControlError: the target is gone or silent.
        """

    def call(self, name: str, timeout: float = 30.0, **arguments: Any) -> Any:
        """Carry out a command."""
        return self.start(name, timeout, **arguments)()

    @abstractmethod
    def goodbye(self) -> None:
        """End the run in good order.

        Raises:
            ControlError: the target did not end as it should.
        """

    @abstractmethod
    def close(self) -> None:
        """End the run whatever state it is in. Idempotent."""


class InProcessTarget(Target):
    """Two sides in one process."""

    def __init__(self, place: Place) -> None:
        self._session = TargetSession(place)

    def start(self, name: str, timeout: float = 30.0, **arguments: Any) -> Callable[[], Any]:
        """See `Target`."""
        result = self._session.call(name, arguments)
        return lambda: result

    def goodbye(self) -> None:
        """See `Target`."""
        self._session.close()

    def close(self) -> None:
        """See `Target`."""
        self._session.close()


class RemoteTarget(Target):
    """A benchmark that listens on another host, or in another terminal."""

    def __init__(self, address: Address, place: Place) -> None:
        self._channel = control.connect(address, _CONNECT_S)
        try:
            control.prove_initiator(self._channel, place.secret)
        except ControlError:
            self._channel.close()
            raise

    def start(self, name: str, timeout: float = 30.0, **arguments: Any) -> Callable[[], Any]:
        """See `Target`."""
        return self._channel.start(name, arguments, timeout)

    def goodbye(self) -> None:
        """See `Target`."""
        self._channel.send({"goodbye": True}, _GOODBYE_S)
        self._channel.receive(_GOODBYE_S)

    def close(self) -> None:
        """See `Target`."""
        self._channel.close()


class SpawnedTarget(Target):
    """A child process on this host, with a secret that only the processes of the run know.

    Args:
        role: which session it serves: ``target``, ``initiator`` or ``pool``.
        secret: of the run; None makes one.
        environ: environment variables beside those of this process.
        log: where its standard error goes; None: to that of this process.
        stoppable: it will be stopped at times, and then could not see that this process is gone: the kernel ends it.
    """

    def __init__(
        self,
        role: str = "target",
        secret: bytes | None = None,
        environ: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        *,
        stoppable: bool = False,
    ) -> None:
        secret = secret or secrets.token_bytes(32)
        #: For the engines of both sides.
        self.place = Place(secret=secret)
        # A session of its own: Ctrl-C in the terminal is for the leading process, which then ends this one.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moonpool.bench.target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
        self._remote: RemoteTarget | None = None
        try:
            port = self._greet({"secret": secret.hex(), "role": role, "stoppable": stoppable})
            self._remote = RemoteTarget(Address("127.0.0.1", port), self.place)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def ended(self, timeout: float) -> int | None:
        """Return the exit status of the child, or minus the signal it died of; None: it runs on after `timeout`."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send the child a signal, unless it has ended."""
        self._process.send_signal(number)

    def start(self, name: str, timeout: float = 30.0, **arguments: Any) -> Callable[[], Any]:
        """See `Target`."""
        assert self._remote is not None
        return self._remote.start(name, timeout, **arguments)

    def goodbye(self) -> None:
        """See `Target`."""
        assert self._remote is not None
        self._remote.goodbye()
        status = self.ended(_GOODBYE_S)
        if status is None:
            raise ControlError("the target process did not end after the run")
        if status not in (ExitStatus.OK, ExitStatus.NOT_VERIFIED):
            raise ControlError(f"the target process ended with status {status}")

    def close(self) -> None:
        """See `Target`."""
        if self._remote is not None:
            self._remote.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if self.ended(_GOODBYE_S) is None:
            self.kill()

    def kill(self) -> None:
        """End the child at once."""
        self._process.kill()
        self._process.wait()

    def _greet(self, order: dict[str, Any]) -> int:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(json.dumps(order).encode() + b"\n")
            pipe_in.flush()
        except BrokenPipeError:
            raise ControlError("the target process ended before it began") from None
        line = b""
        deadline = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(pipe_out, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise ControlError(f"the target process did not start within {_START_S:.0f} s")
                read = os.read(pipe_out.fileno(), 4096)
                if not read:
                    raise ControlError("the target process ended before it listened")
                line += read
        return int(json.loads(line)["port"])
