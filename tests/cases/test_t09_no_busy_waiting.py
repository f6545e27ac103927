# SPDX-License-Identifier: Apache-2.0
"""T9.

What people met: waiting for a transfer burnt a whole core.

What must happen instead: adaptive: short spin, then sleep; idle engine uses no CPU.

These tests count CPU time, not the clock; a slow machine makes them longer, not different.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.processes import Target

from moonpool.transfer_engine import WaitTimeoutError
from moonpool.transfer_engine.testing import FaultProxy


def cpu_seconds() -> float:
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


@pytest.mark.parametrize("transports", ["tcp", "shm"])
def test_idle_engines_use_no_cpu(open_engine: OpenEngine, transports: str) -> None:
    """Connected, with work behind them, on both sides. Anything that spins would use seconds."""
    client = open_engine(listen=None, transports=transports)
    with Target({"kv": 1 << 20}, transports=transports) as target:
        target.add("copied", 1 << 20, "copied")
        peer = client.connect(target.address)
        local = client.allocate(1 << 20)
        for _ in range(100):
            client.read(peer, local, peer.regions["kv"]).wait()
            client.read(peer, local, peer.regions.wait("copied", 90.0)).wait()
        # What was just awake may look for more work for a moment.
        time.sleep(0.2)
        ours, theirs = cpu_seconds(), target.ask("cpu_seconds")
        time.sleep(3.0)
        ours = cpu_seconds() - ours
        assert ours < 0.03
        # Answering the question itself takes the target some of its time.
        assert target.ask("cpu_seconds") - theirs < 0.03
        peer.close()


def test_waiting_for_a_stopped_owner_uses_no_core(open_engine: OpenEngine) -> None:
    """Over shm the owner of registered memory copies to it, and this one does not."""
    client = open_engine(listen=None, transports="shm")
    with Target(transports="shm") as target:
        target.add("kv", 1 << 20, "copied")
        peer = client.connect(target.address)
        local, remote = client.allocate(1 << 20), peer.regions.wait("kv", 90.0)
        client.read(peer, local, remote).wait()
        target.pause()
        transfers = [client.write(peer, local, remote) for _ in range(40)]
        used = cpu_seconds()
        for transfer in transfers[:4]:
            with pytest.raises(WaitTimeoutError):
                transfer.wait(timeout=0.5)
        used = cpu_seconds() - used
        assert used < 0.1
        target.resume()
        for transfer in transfers:
            transfer.wait()
        peer.close()


def test_waiting_uses_no_core(open_engine: OpenEngine) -> None:
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None)
    server.allocate(1 << 20, name="kv")
    with FaultProxy(server.address or "") as network:
        peer = client.connect(network.address)
        local, remote = client.allocate(1 << 20), peer.regions["kv"]
        client.read(peer, local, remote).wait()
        network.stall()
        transfer = client.read(peer, local, remote)

        def wait() -> None:
            with pytest.raises(WaitTimeoutError):
                transfer.wait(timeout=2.0)

        async def await_it() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.ensure_future(wrapped()), 2.0)

        async def wrapped() -> None:
            await transfer

        threads = [threading.Thread(target=wait) for _ in range(3)]
        threads.append(threading.Thread(target=lambda: asyncio.run(await_it())))
        threads.append(threading.Thread(target=lambda: server.notifications(timeout=2.0)))
        used = cpu_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used = cpu_seconds() - used
        # Five waiters for two seconds: burning cores would take up to 4 s on two of them.
        assert used < 0.2
        network.resume()
        transfer.wait()
        peer.close()
