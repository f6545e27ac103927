# SPDX-License-Identifier: Apache-2.0
"""Ends that nobody planned: the interpreter's and a signal's. Each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from engine_testing.programs import PAIR, PRELUDE, run


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_leaving_with_everything_open_and_in_flight(transport: str) -> None:
    out = run(
        PAIR.format(transport=transport)
        + """
    transfers = [client.write(peer, local, remote) for _ in range(8)]
    view = memoryview(region)
    """
    )
    assert out == ""


def test_leaving_warns_about_unclosed_engines_when_asked() -> None:
    out = run("engine = TransferEngine('left-open')", "-W", "always::ResourceWarning")
    assert "'left-open', made at <string>:6, was never closed" in out


def test_leaving_with_warnings_as_errors_still_closes() -> None:
    out = run("engine = TransferEngine('left-open')", "-W", "error::ResourceWarning")
    assert "ResourceWarning" in out


def test_leaving_through_atexit_handlers_that_use_the_engine() -> None:
    out = run(
        PAIR.format(transport="tcp")
        + """
    # Registered after the engines, so it runs before they are closed.
    atexit.register(lambda: print(client.read(peer, local, remote).wait().state.name))
    """
    )
    assert out == "COMPLETED\n"


def test_leaving_with_threads_that_wait() -> None:
    out = run(
        PAIR.format(transport="tcp")
        + """
    started = threading.Barrier(3)
    def take():
        started.wait()
        try:
            server.notifications(timeout=1000.0)
        except ClosedError:
            pass
    for _ in range(2):
        threading.Thread(target=take, daemon=True).start()
    started.wait()
    """
    )
    assert out == ""


def test_leaving_by_an_exception() -> None:
    out = run(PAIR.format(transport="tcp") + "    raise RuntimeError('boom')", expect=1)
    assert "boom" in out


def test_objects_in_cycles_are_collected_in_any_order() -> None:
    out = run(
        PAIR.format(transport="tcp")
        + """
    class Holder:
        pass
    warnings.simplefilter("ignore", ResourceWarning)
    for _ in range(3):
        holder = Holder()
        holder.engine = TransferEngine("cycle", listen=None, transports="tcp")
        holder.memory = bytearray(4096)
        holder.region = holder.engine.register(holder.memory)
        holder.peer = holder.engine.connect(server.address)
        holder.transfer = holder.engine.read(holder.peer, holder.region, holder.peer.regions["kv"], 0, 0, 4096)
        holder.plan = holder.engine.prepare(holder.peer, holder.region, holder.peer.regions["kv"], 0, 0, 4096)
        holder.myself = holder
        del holder
        gc.collect()
    """
    )
    assert out == ""


def interrupt(program: str) -> None:
    """Run `program`, press Ctrl-C once it says that it waits, and see it end in order."""
    # A shell that starts the tests in the background makes them, and all their children, ignore it.
    begin = PRELUDE + "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with subprocess.Popen(
        [sys.executable, "-c", begin + textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waiting\n"
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    "call",
    [
        "engine.connect(silent)",
        "peer.ensure()",
        "peer.regions['kv']",
        "peer.regions.wait('other', 1000.0)",
    ],
)
def test_ctrl_c_ends_a_wait_for_a_connection(call: str) -> None:
    """A host that accepts and never answers, and the longest time-out there is."""
    program = f"""
    import socket
    listener = socket.create_server(("127.0.0.1", 0))
    silent = "127.0.0.1:%d" % listener.getsockname()[1]
    with TransferEngine(listen=None, transports="tcp", connect_timeout=86_400.0) as engine:
        if "peer" in {call!r}:
            with TransferEngine("server", transports="tcp") as server:
                address = server.address
                peer = engine.connect(address)
            while peer.state is PeerState.READY:
                pass
            host, port = address.split(":")
            silent_again = socket.create_server((host, int(port)))
        try:
            print("waiting", flush=True)
            {call}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    interrupt(program)


def test_what_a_signal_handler_raises_ends_a_wait_for_a_connection() -> None:
    out = run(
        """
    import signal, socket
    listener = socket.create_server(("127.0.0.1", 0))
    class Enough(Exception):
        pass
    def enough(*_):
        raise Enough
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    signal.signal(signal.SIGALRM, enough)
    with TransferEngine(listen=None, transports="tcp", connect_timeout=86_400.0) as engine:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        os.kill(os.getpid(), signal.SIGUSR1)
        try:
            engine.connect("127.0.0.1:%d" % listener.getsockname()[1])
        except Enough:
            print("ended", seen)
    """
    )
    assert out == "ended [1]\n"


def test_ctrl_c_ends_a_wait() -> None:
    """A native wait gives Python the chance to run its signal handlers."""
    program = """
    with TransferEngine(listen=None) as engine:
        try:
            print("waiting", flush=True)
            engine.notifications(timeout=1000.0)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    interrupt(program)
