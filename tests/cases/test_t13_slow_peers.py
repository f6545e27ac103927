# SPDX-License-Identifier: Apache-2.0
"""T13.

What people met: a mutex held during network I/O let one slow peer stall all the others.

What must happen instead: no lock is held across I/O.
"""

from __future__ import annotations

import contextlib
import threading

from engine_testing import wire
from engine_testing.fixtures import OpenEngine
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import MoonpoolError, TransferState
from moonpool.transfer_engine.testing import FaultProxy

NBYTES = 4 << 20


def test_a_stalled_peer_delays_no_other(open_engine: OpenEngine) -> None:
    """The client's side: one I/O thread drives both peers."""
    slow_server, fast_server = open_engine("slow", transports="tcp"), open_engine("fast", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None, io_threads=1)
    slow_server.allocate(NBYTES, name="kv")
    fill(fast_server.allocate(NBYTES, name="kv"))
    with FaultProxy(slow_server.address or "") as network:
        slow, fast = client.connect(network.address), client.connect(fast_server.address or "")
        slow_remote, fast_remote = slow.regions["kv"], fast.regions["kv"]
        local, other = client.allocate(NBYTES), client.allocate(NBYTES)
        network.stall()
        stuck = [client.read(slow, other, slow_remote) for _ in range(20)]
        stuck += [client.write(slow, other, slow_remote, notify=bytes(65_536)) for _ in range(20)]
        waiters = [threading.Thread(target=_wait_until_it_ends, args=(transfer,)) for transfer in stuck[:4]]
        for waiter in waiters:
            waiter.start()
        for step in range(200):
            client.read(fast, local, fast_remote, 0, 0, 4096 if step % 2 else NBYTES).wait()
            client.allocate(64, name="came and went").release()
            assert "kv" in fast.regions
            client.stats()
        assert bytes(local) == pattern(NBYTES)
        with client.connect(fast_server.address or "") as another:
            client.write(another, local, another.regions["kv"]).wait()
        assert all(transfer.state is TransferState.RUNNING for transfer in stuck)
        client.close()
        for waiter in waiters:
            waiter.join()


def test_an_owner_that_is_stopped_delays_no_other(open_engine: OpenEngine) -> None:
    """The same over shm: one I/O thread drives both peers, and one of them does not copy."""
    client = open_engine("client", transports="shm", listen=None, io_threads=1)
    with Target(transports="shm") as slow_target, Target({"mapped": NBYTES}, transports="shm") as fast_target:
        slow_target.add("kv", NBYTES, "copied")
        fast_target.add("kv", NBYTES, "copied")
        slow, fast = client.connect(slow_target.address), client.connect(fast_target.address)
        local, other = client.allocate(NBYTES), client.allocate(NBYTES)
        slow_remote = slow.regions.wait("kv", 90.0)
        client.read(slow, other, slow_remote).wait()
        slow_target.pause()
        stuck = [client.write(slow, other, slow_remote) for _ in range(40)]
        for step in range(100):
            client.read(fast, local, fast.regions.wait("kv", 90.0), 0, 0, 4096 if step % 2 else NBYTES).wait()
            client.read(fast, local, fast.regions["mapped"], 0, 0, 4096 if step % 2 else NBYTES).wait()
        assert bytes(local) == pattern(NBYTES)
        assert all(transfer.state is TransferState.RUNNING for transfer in stuck)
        slow_target.resume()
        for transfer in stuck:
            transfer.wait()
        slow.close()
        fast.close()


def _wait_until_it_ends(transfer: object) -> None:
    try:
        transfer.wait()  # type: ignore[attr-defined]
    except MoonpoolError:
        return


def ask_and_never_read(client: wire.Client, name: str) -> None:
    """Ask for far more of a region than the sockets hold, and take none of it."""
    lane = client.open_lane()
    lane.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        for index in range(100_000):
            lane.sendall(wire.request(wire.READ, [(client.regions[name].key, 0, NBYTES)], request_id=index))


def test_a_client_that_does_not_take_its_answers_delays_no_other(open_engine: OpenEngine) -> None:
    """The server's side: one I/O thread serves both clients."""
    server = open_engine("server", transports="tcp", io_threads=1)
    fill(server.allocate(NBYTES, name="kv"))
    with wire.Client(server.address or "") as greedy:
        ask_and_never_read(greedy, "kv")
        client = open_engine("client", transports="tcp", listen=None)
        peer = client.connect(server.address or "")
        local, remote = client.allocate(NBYTES), peer.regions["kv"]
        for _ in range(50):
            client.read(peer, local, remote).wait()
            client.write(peer, local, remote, notify=b"x").wait()
        assert bytes(local) == pattern(NBYTES)


def test_a_region_can_be_released_although_a_client_does_not_take_it(open_engine: OpenEngine) -> None:
    """The lane that is stuck with it is cut; the release does not wait for the one who does not read."""
    server = open_engine("server", transports="tcp", io_threads=1)
    region = server.allocate(NBYTES, name="kv")
    with wire.Client(server.address or "") as greedy:
        ask_and_never_read(greedy, "kv")
        region.release()
        memoryview(server.allocate(NBYTES))[:] = bytes(NBYTES)


def test_a_session_that_reads_no_announcements_is_bounded(open_engine: OpenEngine) -> None:
    """Regions are announced to everybody; one who does not listen holds up neither the others nor the engine."""
    server = open_engine("server", transports="tcp", io_threads=1)
    with wire.Client(server.address or ""):
        for index in range(3000):
            server.allocate(64, name=f"{index:0250}").release()
        server.allocate(64, name="last")
        client = open_engine("client", transports="tcp", listen=None)
        assert "last" in client.connect(server.address or "").regions
