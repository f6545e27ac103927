# SPDX-License-Identifier: Apache-2.0
"""Ends that nobody planned: the interpreter's, a fork's, a signal's. Each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import atexit, gc, os, sys, threading, warnings
# Python 3.12 and later warn of every fork in a process with threads; the engine has some, and is made for it.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
from moonpool.transfer_engine import *
"""


def run(program: str, *options: str, expect: int = 0) -> str:
    """Run `program` and return what it wrote; it must end by itself with status `expect`."""
    done = subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == expect, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


PAIR = """
    server = TransferEngine("server", transports={transport!r})
    client = TransferEngine("client", transports={transport!r}, listen=None)
    region = server.allocate(64 << 20, name="kv")
    peer = client.connect(server.address)
    local = client.allocate(64 << 20)
    remote = peer.regions["kv"]
"""


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
        holder.engine = TransferEngine("cycle", listen=None)
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


FORK = """
    pid = os.fork()
    if pid == 0:
        {child}
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    fill = memoryview(region)
    fill[:3] = b"abc"
    client.read(peer, local, remote, 0, 0, 3).wait()
    assert bytes(memoryview(local)[:3]) == b"abc"
    client.close()
    server.close()
    print("parent goes on")
"""


def forked(child: str, transport: str = "tcp") -> str:
    return run(PAIR.format(transport=transport) + FORK.format(child=child.strip()))


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_a_forked_child_is_refused_with_a_reason(transport: str) -> None:
    out = forked(
        """
        for call in (lambda: client.read(peer, local, remote, 0, 0, 3), lambda: client.allocate(64),
                     lambda: client.connect(server.address), lambda: client.notifications(), lambda: peer.ensure(),
                     lambda: client.register(bytearray(8)), lambda: region.release(),
                     lambda: client.prepare(peer, local, remote, 0, 0, 3)):
            try:
                call()
            except ForkedError as error:
                assert error.hint, error
            else:
                os._exit(1)
        os._exit(0)
        """,
        transport,
    )
    assert out == "parent goes on\n"


def test_a_forked_child_may_close_and_collect_what_it_inherited() -> None:
    out = forked(
        """
        client.close()
        server.close()
        client.close()
        del client, server, region, peer, local, remote
        gc.collect()
        os._exit(0)
        """
    )
    assert out == "parent goes on\n"


def test_a_forked_child_may_leave_in_the_ordinary_way() -> None:
    assert forked("sys.exit(0)") == "parent goes on\n"


def test_a_fork_while_another_thread_closes() -> None:
    out = run(
        """
    for _ in range(20):
        engine = TransferEngine(listen=None)
        thread = threading.Thread(target=engine.close)
        thread.start()
        pid = os.fork()
        if pid == 0:
            engine.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        thread.join()
    print("done")
    """
    )
    assert out == "done\n"


def test_a_forked_child_can_open_an_engine_of_its_own() -> None:
    out = forked(
        """
        with TransferEngine("child") as engine, TransferEngine("other", listen=None) as other:
            engine.allocate(64, name="own")
            link = other.connect(engine.address)
            other.read(link, other.allocate(64), link.regions["own"]).wait()
        os._exit(0)
        """
    )
    assert out == "parent goes on\n"


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
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(60) == 0
