# SPDX-License-Identifier: Apache-2.0
"""What a forked child may do with an engine that it inherited: nothing but close it, and it is told so."""

from __future__ import annotations

import textwrap

import pytest
from engine_testing.programs import PAIR, run

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


def forked(child: str, transport: str = "tcp", before: str = "") -> str:
    before = textwrap.indent(textwrap.dedent(before), "    ")
    return run(PAIR.format(transport=transport) + before + FORK.format(child=child.strip()))


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


def test_every_call_in_a_forked_child_says_so() -> None:
    out = forked(
        """
        calls = (
            transfer.wait, transfer.result, transfer.done, transfer.cancel, lambda: transfer.wait(0.1),
            lambda: transfer.cancel(0.1), lambda: transfer.state, lambda: transfer.settled, lambda: transfer.error,
            lambda: transfer.statuses, lambda: transfer.digests, lambda: asyncio.run(await_it(transfer)),
            finished.wait, finished.done, lambda: finished.state, lambda: finished.statuses, finished.cancel,
            client.stats, client.notifications, lambda: client.notifications(0.1),
            lambda: peer.state, lambda: peer.name, lambda: peer.address, lambda: peer.path, lambda: peer.incarnation,
            lambda: list(peer.regions), lambda: len(peer.regions), lambda: peer.regions["kv"],
            lambda: "kv" in peer.regions, lambda: peer.regions.wait("kv", 1.0), peer.ensure,
            lambda: client.post(plan), lambda: client.write(peer, local, remote),
            lambda: server.fence(client.incarnation),
        )
        for index, call in enumerate(calls):
            try:
                call()
            except ForkedError as error:
                assert "make a new engine in the child" in error.hint, (index, error)
            else:
                raise AssertionError(index)
        peer.close()
        print([repr(each) for each in (client, peer, peer.regions, transfer, plan, region)], file=open(os.devnull, "w"))
        os._exit(0)
        """,
        before="""
        import asyncio
        async def await_it(transfer):
            await transfer
        plan = client.prepare(peer, local, remote, 0, 0, 64)
        finished = client.read(peer, local, remote).wait()
        transfer = client.read(peer, local, remote)
        """,
    )
    assert out == "parent goes on\n"


def test_a_child_leaves_a_with_statement_in_silence() -> None:
    out = run(
        """
        with TransferEngine("server") as server, TransferEngine("client", listen=None) as client:
            with client.connect(server.address) as peer:
                pid = os.fork()
                if pid == 0:
                    sys.exit(0)
                assert os.waitpid(pid, 0)[1] == 0
                assert peer.state is PeerState.READY
        """
    )
    assert out == ""


@pytest.mark.parametrize(
    "leave", ["sys.exit(0)", "raise asyncio.CancelledError", "del loop; gc.collect(); os._exit(0)"]
)
def test_a_child_of_an_awaiting_process_leaves_in_silence(leave: str) -> None:
    """The loop, with its descriptor and its waiting tasks, goes with the child."""
    out = run(
        PAIR.format(transport="tcp")
        + f"""
    import asyncio, contextlib
    loop = asyncio.new_event_loop()
    async def begin():
        waiting = [asyncio.ensure_future(await_it(client.read(peer, local, remote))) for _ in range(4)]
        await asyncio.sleep(0)
        return waiting
    async def await_it(transfer):
        await transfer
    waiting = loop.run_until_complete(begin())
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(asyncio.CancelledError):
            {leave}
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    loop.run_until_complete(asyncio.wait(waiting))
    loop.close()
    client.close()
    server.close()
    """
    )
    assert out == ""
