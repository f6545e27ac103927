# SPDX-License-Identifier: Apache-2.0
"""T14.

What people met: a native wait or a destructor held the GIL and froze the interpreter, once as a deadlock with the
driver.

What must happen instead: a ticking Python thread keeps ticking during every blocking call and every close.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.networks import mute_host, unaccepting_host

from moonpool.transfer_engine import MoonpoolError, Peer, PeerState, Region, RemoteRegion, TransferEngine
from moonpool.transfer_engine.testing import FaultProxy

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCKED_SECONDS = 0.3
#: A frozen interpreter ticks not at all; a busy machine may take many times the millisecond between two ticks.
TICKS_AT_LEAST = 5


class Ticker:
    """A Python thread that counts as long as it gets to run."""

    def __init__(self) -> None:
        self.ticks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.ticks += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Stalled:
    """A client whose peer does not answer any more."""

    def __init__(
        self, client: TransferEngine, peer: Peer, local: Region, remote: RemoteRegion, network: FaultProxy
    ) -> None:
        self.client, self.peer, self.local, self.remote, self.network = client, peer, local, remote, network


@pytest.fixture
def stalled(open_engine: OpenEngine) -> Iterator[Stalled]:
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None)
    server.allocate(8 << 20, name="kv")
    with FaultProxy(server.address or "") as network:
        peer = client.connect(network.address)
        local = client.allocate(8 << 20)
        client.read(peer, local, peer.regions["kv"]).wait()
        network.stall()
        yield Stalled(client, peer, local, peer.regions["kv"], network)
        network.resume()
        client.close()
        server.close()


def blocked_write(stalled: Stalled) -> Any:
    taken = stalled.network.taken_bytes
    transfer = stalled.client.write(stalled.peer, stalled.local, stalled.remote)
    while stalled.network.taken_bytes == taken:
        time.sleep(0.001)
    return transfer


BLOCKING: dict[str, Callable[[Stalled], Any]] = {
    "wait": lambda s: s.client.read(s.peer, s.local, s.remote).wait(BLOCKED_SECONDS),
    "wait for a deadline": lambda s: s.client.read(s.peer, s.local, s.remote, deadline=BLOCKED_SECONDS).wait(),
    "cancel": lambda s: blocked_write(s).cancel(BLOCKED_SECONDS),
    "notifications": lambda s: s.client.notifications(timeout=BLOCKED_SECONDS),
    "waiting for a region": lambda s: s.peer.regions.wait("never", BLOCKED_SECONDS),
}


@pytest.mark.parametrize("call", BLOCKING)
def test_others_run_during_a_blocking_call(stalled: Stalled, call: str) -> None:
    with Ticker() as ticker:
        before = ticker.ticks
        with contextlib.suppress(MoonpoolError):
            BLOCKING[call](stalled)
        assert ticker.ticks - before >= TICKS_AT_LEAST


@pytest.mark.parametrize("host", [unaccepting_host, mute_host])
def test_others_run_while_connecting(open_engine: OpenEngine, host: Any) -> None:
    engine = open_engine(listen=None)
    with host() as address, Ticker() as ticker:
        before = ticker.ticks
        with pytest.raises(ConnectionError):
            engine.connect(address, timeout=BLOCKED_SECONDS)
        assert ticker.ticks - before >= TICKS_AT_LEAST


def test_others_run_while_connecting_again(stalled: Stalled) -> None:
    stalled.network.cut()
    # Until the loss is seen there is nothing to connect again, and nothing would block.
    assert eventually(lambda: stalled.peer.state is not PeerState.READY)
    with Ticker() as ticker:
        before = ticker.ticks
        with contextlib.suppress(MoonpoolError):
            stalled.peer.ensure(BLOCKED_SECONDS)
        with contextlib.suppress(MoonpoolError):
            stalled.client.read(stalled.peer, stalled.local, stalled.remote, deadline=BLOCKED_SECONDS).wait()
        assert ticker.ticks - before >= TICKS_AT_LEAST


@pytest.mark.parametrize("transports", ["local", "shm"])
def test_others_run_while_memory_is_copied(open_engine: OpenEngine, transports: str) -> None:
    """A submission may copy at once: gigabytes of it must not stop the interpreter."""
    server, client = open_engine(transports=transports), open_engine(transports=transports, listen=None)
    server.allocate(64 << 20, name="kv")
    peer, local = client.connect(server.address or ""), client.allocate(64 << 20)
    with Ticker() as ticker:
        before = ticker.ticks
        for _ in range(20):
            client.read(peer, local, peer.regions["kv"], digest=True).wait()
        assert ticker.ticks - before >= TICKS_AT_LEAST


def test_closing_while_python_threads_wait_inside(stalled: Stalled) -> None:
    """Close joins native threads and wakes waiters, which need the GIL to leave: neither may wait for the other."""
    ended: list[str] = []

    def wait(call: str) -> None:
        with contextlib.suppress(MoonpoolError):
            if call == "transfer":
                stalled.client.read(stalled.peer, stalled.local, stalled.remote).wait()
            elif call == "notifications":
                stalled.client.notifications(timeout=1000.0)
            else:
                stalled.peer.regions.wait("never", 1000.0)
        ended.append(call)

    calls = ["transfer", "notifications", "regions"] * 3
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    with Ticker():
        stalled.client.close()
        for thread in threads:
            thread.join()
    assert sorted(ended) == sorted(calls)


def test_dropping_everything_while_it_runs(open_engine: OpenEngine) -> None:
    """Destructors of transfers, plans, peers, regions and engines run without the GIL, and in any order."""
    server = open_engine("server", transports="tcp")
    server.allocate(8 << 20, name="kv")
    with Ticker() as ticker:
        for _ in range(20):
            client = TransferEngine("dropped", listen=None, transports="tcp")
            peer = client.connect(server.address or "")
            local, remote = client.allocate(8 << 20), peer.regions["kv"]
            plan = client.prepare(peer, local, remote, 0, 0, 8 << 20)
            transfers = [client.post(plan), client.read(peer, local, remote), client.write(peer, local, remote)]
            client.close()
            del plan, peer, remote, transfers, local, client
        assert ticker.ticks > 0


def test_a_callback_of_the_garbage_collector_may_use_the_engine(open_engine: OpenEngine) -> None:
    """A finalizer that runs in the middle of a call may call into the engine again."""
    engine = open_engine(transports="local")

    class Final:
        def __init__(self, region: Region) -> None:
            self.region = region

        def __del__(self) -> None:
            self.region.release()
            engine.allocate(64).release()

    for _ in range(200):
        cycle: list[Any] = [Final(engine.allocate(4096))]
        cycle.append(cycle)
        del cycle
    gc.collect()
    assert not engine._lifetime.regions
