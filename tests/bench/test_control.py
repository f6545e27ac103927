# SPDX-License-Identifier: Apache-2.0
"""The two processes of a run recognise each other, and notice when the other is gone."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_testing.fixtures import no_leaks

from moonpool.address import Address
from moonpool.bench import control
from moonpool.bench.backends import Place
from moonpool.bench.control import Channel
from moonpool.bench.errors import ControlError, ExitStatus, TargetError
from moonpool.bench.session import TargetSession
from moonpool.bench.target import accept, serve
from moonpool.bench.targets import RemoteTarget
from moonpool.bench.work import Work

__all__ = ["no_leaks"]

SECRET = b"of this run"
WORK = Work("tcp", "write", 4096, 1, "sequential", 1, None, 8192)


class Listener:
    """A target in a thread: serves one caller that knows the secret."""

    def __init__(self) -> None:
        self.listening = control.listen(Address("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self.listening.getsockname()[1])
        self.outcome: list[ExitStatus | ControlError] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        channel = accept(self.listening, SECRET)
        session = TargetSession(Place(secret=SECRET))
        try:
            self.outcome.append(serve(channel, session))
        except ControlError as error:
            self.outcome.append(error)
        finally:
            session.close()
            channel.close()

    def join(self) -> ExitStatus | ControlError:
        self._thread.join()
        return self.outcome[0]


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    if not made.outcome:
        made.join()
    made.listening.close()


def test_says_goodbye_in_good_order(listener: Listener) -> None:
    target = RemoteTarget(listener.address, Place(secret=SECRET))
    assert target.call("describe")["python"]
    assert isinstance(target.call("mark"), float)
    target.goodbye()
    target.close()
    assert listener.join() == ExitStatus.OK


def test_the_status_of_the_target_says_whether_its_bytes_matched(listener: Listener) -> None:
    target = RemoteTarget(listener.address, Place(secret=SECRET))
    target.call("open", work=WORK.to_json(), window=1)
    assert target.call("check", window=2, done=[[0, 0]])["ok"]
    # A window whose bytes never came.
    assert not target.call("check", window=3, done=[[0, 1]])["ok"]
    target.goodbye()
    target.close()
    assert listener.join() == ExitStatus.NOT_VERIFIED


def test_a_caller_with_another_secret_is_told_and_the_next_one_is_served(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ControlError, match=r"different secrets.*same --secret"):
        RemoteTarget(listener.address, Place(secret=b"wrong"))
    with pytest.raises(ControlError, match="different secrets"):
        RemoteTarget(listener.address, Place(secret=None))
    with socket.create_connection((listener.address.host, listener.address.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert json.loads(stranger.makefile().readline())["mooncake_bench"] == control.PROTOCOL
    target = RemoteTarget(listener.address, Place(secret=SECRET))
    target.goodbye()
    target.close()
    assert "a caller has another secret" in capfd.readouterr().err


def test_a_target_that_does_not_know_the_secret_is_found_out() -> None:
    with control.listen(Address("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            channel = Channel(listening.accept()[0], "caller")
            channel.send({"mooncake_bench": control.PROTOCOL, "nonce": "00"}, 5.0)
            channel.receive(5.0)
            channel.send({"proof": "00"}, 5.0)
            channel.close()

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(ControlError, match="different secrets"):
            RemoteTarget(Address("127.0.0.1", listening.getsockname()[1]), Place(secret=SECRET))
        pretending.join()


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("frobnicate", {}, "unknown command"),
        ("close", {}, "unknown command"),
        ("fill", {"window": 1}, "no row is open"),
        ("open", {"work": {"op": "read"}, "window": 1}, "unknown way"),
        ("open", {"work": WORK.to_json() | {"footprint_bytes": 1 << 60}, "window": 1}, "more than this machine"),
        ("mark", {"surprise": 1}, "TypeError"),
    ],
)
def test_a_bad_command_is_an_answer_and_not_the_end(
    listener: Listener, command: str, arguments: dict[str, Any], message: str
) -> None:
    target = RemoteTarget(listener.address, Place(secret=SECRET))
    with pytest.raises(TargetError, match=message):
        target.call(command, **arguments)
    assert isinstance(target.call("mark"), float)
    target.goodbye()
    target.close()


def test_a_caller_that_vanishes_is_noticed(listener: Listener) -> None:
    target = RemoteTarget(listener.address, Place(secret=SECRET))
    target.close()
    target.close()
    assert isinstance(listener.join(), ControlError)


def test_a_channel_that_was_closed_meanwhile_is_a_typed_error() -> None:
    """The watcher of a target closes it when the parent is gone, whatever the target is about to do with it."""
    ours, theirs = _tcp_pair()
    channel = Channel(ours, "parent")
    channel.close()
    theirs.close()
    with pytest.raises(ControlError):
        channel.send({"result": {}}, 1.0)
    with pytest.raises(ControlError):
        channel.receive(1.0)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def test_nobody_there_is_an_error_with_a_hint() -> None:
    with control.listen(Address("127.0.0.1", 0)) as listening:
        address = Address("127.0.0.1", listening.getsockname()[1])
    with pytest.raises(ControlError, match=r"cannot connect to 127.0.0.1:.*transfer --listen"):
        RemoteTarget(address, Place())


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"not json\n", "does not speak JSON"),
        (b"[]\n", "no JSON object"),
        (b"x" * (2 << 20), "a line without an end"),
        (b"", "ended"),
        (None, "does not answer"),
    ],
)
def test_garbage_and_silence_are_errors(sent: bytes | None, message: str) -> None:
    with control.listen(Address("127.0.0.1", 0)) as listening:
        far = socket.create_connection(listening.getsockname())
        channel = Channel(listening.accept()[0], "far")

    def send() -> None:
        with contextlib.suppress(OSError):  # the receiver may have had enough
            far.sendall(sent or b"")
            if sent is not None:
                far.shutdown(socket.SHUT_WR)

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(ControlError, match=message):
        channel.receive(0.2 if sent is None else 10.0)
    channel.close()
    sending.join()
    far.close()


def test_lines_may_come_in_pieces_and_together() -> None:
    with control.listen(Address("127.0.0.1", 0)) as listening:
        far = socket.create_connection(listening.getsockname())
        channel = Channel(listening.accept()[0], "far")
    with far:
        far.sendall(b'{"a": 1}\n{"b"')
        assert channel.receive(5.0) == {"a": 1}
        far.sendall(b": 2}\n")
        assert channel.receive(5.0) == {"b": 2}
    channel.close()
