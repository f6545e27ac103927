# SPDX-License-Identifier: Apache-2.0
"""Awaiting transfers in event loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.leaks import descriptors, eventually
from engine_testing.patterns import fill, pattern

from moonpool.transfer_engine import (
    ClosedError,
    DeadlineError,
    OutOfRangeError,
    RegionReleasedError,
    Transfer,
    TransferState,
)
from moonpool.transfer_engine.testing import FaultProxy


@pytest.fixture
def slow(open_engine: OpenEngine) -> Iterator[tuple[Pair, FaultProxy]]:
    """A pair whose network is stalled until the test resumes it, so that transfers are still running when awaited."""
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None)
    region = server.allocate(1 << 20, name="kv")
    fill(region)
    with FaultProxy(server.address or "") as network:
        peer = client.connect(network.address)
        local = client.allocate(1 << 20)
        client.read(peer, local, peer.regions["kv"], 0, 0, 64).wait()
        # No descriptor comes later, which some tests count.
        assert eventually(lambda: server.stats()["serving"]["lanes"] == client.stats()["lanes"])
        network.stall()
        yield Pair(client, server, peer, local, region, peer.regions["kv"]), network
        network.resume()
        client.close()
        server.close()


async def switch() -> None:
    """Let every task that is ready run up to its next await."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_awaiting_a_running_transfer(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow

    async def main() -> None:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote)
        task = asyncio.ensure_future(_await(transfer))
        await switch()
        assert not task.done()
        network.resume()
        assert await task is transfer

    asyncio.run(main())
    assert bytes(pair.local) == pattern(1 << 20)


async def _await(transfer: Transfer) -> Transfer:
    return await transfer


def test_awaiting_a_transfer_that_has_ended(pair: Pair) -> None:
    fill(pair.region)

    async def main() -> None:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote).wait()
        assert await transfer is transfer
        assert await transfer is transfer

    asyncio.run(main())


def test_many_at_once(pair: Pair) -> None:
    fill(pair.region)

    async def main() -> list[Transfer]:
        offsets = range(0, 1 << 16, 64)
        transfers = [pair.client.read(pair.peer, pair.local, pair.remote, at, at, 64) for at in offsets]
        return await asyncio.gather(*map(_await, transfers))

    transfers = asyncio.run(main())
    assert all(transfer.state is TransferState.COMPLETED for transfer in transfers)
    assert bytes(pair.local) == pattern(1 << 16)


def test_one_after_another_in_one_loop(pair: Pair) -> None:
    async def main() -> None:
        for at in range(0, 1 << 16, 256):
            await pair.client.write(pair.peer, pair.local, pair.remote, at, at, 256)

    fill(pair.local)
    asyncio.run(main())
    assert bytes(pair.region) == pattern(1 << 16)


def test_failures_are_raised(slow: tuple[Pair, FaultProxy], open_engine: OpenEngine) -> None:
    pair, _ = slow

    async def main() -> None:
        with pytest.raises(DeadlineError):
            await pair.client.read(pair.peer, pair.local, pair.remote, deadline=0.05)
        running = pair.client.read(pair.peer, pair.local, pair.remote)
        task = asyncio.ensure_future(_await(running))
        await switch()
        pair.client.close()
        with pytest.raises(ClosedError):
            await task

    asyncio.run(main())


def test_a_refused_batch_raises_before_there_is_anything_to_await(pair: Pair) -> None:
    async def main() -> None:
        with pytest.raises(OutOfRangeError):
            await pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 1 << 17)
        pair.region.release()
        with pytest.raises(RegionReleasedError):
            await pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 64)

    asyncio.run(main())


def test_cancelling_the_task_does_not_touch_the_transfer(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow

    async def main() -> Transfer:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote)
        task = asyncio.ensure_future(_await(transfer))
        await switch()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.state is TransferState.RUNNING
        network.resume()
        # It can be awaited again.
        return await transfer

    assert asyncio.run(main()).state is TransferState.COMPLETED
    assert bytes(pair.local) == pattern(1 << 20)


def test_a_timeout_around_it_leaves_it_running(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow

    async def main() -> None:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(transfer), 0.05)
        assert transfer.state is TransferState.RUNNING
        network.resume()
        await transfer

    asyncio.run(main())


def test_several_tasks_await_one_transfer(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow

    async def main() -> None:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote)
        tasks = [asyncio.ensure_future(_await(transfer)) for _ in range(5)]
        await switch()
        tasks[0].cancel()
        await switch()
        network.resume()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [transfer] * 4

    asyncio.run(main())


def test_several_loops_await_one_transfer(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    waiting = threading.Barrier(4)
    results: list[Transfer] = []

    async def main() -> None:
        task = asyncio.ensure_future(_await(transfer))
        await switch()
        await asyncio.get_running_loop().run_in_executor(None, waiting.wait)
        results.append(await task)

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait()
    network.resume()
    for thread in threads:
        thread.join()
    assert results == [transfer] * 3


def test_every_loop_can_leave_a_transfer_that_goes_on(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow
    transfer = pair.client.read(pair.peer, pair.local, pair.remote)
    gave_up: list[int] = []

    async def main(index: int) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(transfer, 0.2)
        gave_up.append(index)

    threads = [threading.Thread(target=lambda index=index: asyncio.run(main(index))) for index in range(3)]
    for thread in threads:
        thread.start()
    # Nothing but giving up ends them: the network is stalled.
    for thread in threads:
        thread.join()
    assert sorted(gave_up) == [0, 1, 2]
    assert not transfer.done()
    network.resume()
    transfer.wait()


def test_loops_in_several_threads(pair: Pair) -> None:
    fill(pair.region)
    bad: list[int] = []

    def work(index: int) -> None:
        async def main() -> None:
            local = pair.client.allocate(4096)
            for step in range(50):
                at = (index * 50 + step) * 64
                await pair.client.read(pair.peer, local, pair.remote, 0, at, 64)
                if bytes(memoryview(local)[:64]) != pattern(1 << 16)[at : at + 64]:
                    bad.append(index)

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad


def test_loops_leave_no_descriptor(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow
    gc.collect()
    before = descriptors()

    async def main() -> None:
        transfer = pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 64)
        task = asyncio.ensure_future(_await(transfer))
        await switch()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for _ in range(20):
        asyncio.run(main())
    gc.collect()
    assert len(descriptors()) <= len(before)
    network.resume()


def test_a_loop_that_was_closed_with_a_waiting_task_is_cleaned_up_by_the_next(slow: tuple[Pair, FaultProxy]) -> None:
    pair, network = slow
    loop = asyncio.new_event_loop()
    transfer = pair.client.read(pair.peer, pair.local, pair.remote, 0, 0, 64)

    async def begin() -> None:
        loop.stop()
        await transfer

    task = loop.create_task(begin())
    loop.run_forever()
    loop.close()
    before = len(descriptors())

    async def main() -> None:
        # Only once this loop waits: a transfer that has ended is not waited for.
        asyncio.get_running_loop().call_soon(network.resume)
        await transfer

    asyncio.run(main())
    gc.collect()
    assert len(descriptors()) < before
    # Ends the coroutine, which nothing will run again.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.get_coro().close()  # type: ignore[union-attr]


def test_numbers_may_be_numpy_arrays_here_too(pair: Pair) -> None:
    async def main() -> bytes:
        offsets = np.arange(16) * 64
        return (await pair.client.read(pair.peer, pair.local, pair.remote, offsets, offsets, 64)).result()

    assert asyncio.run(main()) == bytes(16)
