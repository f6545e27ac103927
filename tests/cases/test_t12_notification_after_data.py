# SPDX-License-Identifier: Apache-2.0
"""T12.

What people met: a notification arrived before the data it announced.

What must happen instead: data visible first; stress test with checksums.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.processes import Target

from moonpool.transfer_engine import digest

WRITERS = 4
ROUNDS = 60
SLOT = 1 << 20


@pytest.mark.parametrize(("transports", "kind"), [("tcp", "copied"), ("shm", "copied"), ("shm", "mapped")])
def test_between_two_processes(open_engine: OpenEngine, transports: str, kind: str) -> None:
    """Each writer fills its slot again and again and announces the byte; the target looks at once."""
    client = open_engine(listen=None, transports=transports, lanes=4)
    total = WRITERS * ROUNDS
    with Target(transports=transports) as target:
        target.add("kv", WRITERS * SLOT, kind)
        peer = client.connect(target.address)
        remote = peer.regions.wait("kv", 90.0)

        def write(writer: int) -> None:
            generator = np.random.default_rng(writer)
            local = client.allocate(SLOT)
            for round_ in range(ROUNDS):
                byte = 1 + (round_ + writer) % 255
                length = int(generator.integers(1, SLOT + 1))
                memoryview(local)[:] = bytes([byte]) * SLOT
                # In many pieces or in one, so that it travels over one lane or over all.
                pieces = int(generator.choice([1, 2, 50]))
                bounds = np.unique(np.linspace(0, length, pieces + 1).astype(int))
                at = bounds[:-1]
                announcement = b"%d %d %d" % (writer * SLOT, length, byte)
                client.write(peer, local, remote, at, at + writer * SLOT, np.diff(bounds), notify=announcement).wait()
                acknowledged[writer].acquire()

        # A writer must not overwrite what the target has not looked at yet.
        acknowledged = [threading.Semaphore(0) for _ in range(WRITERS)]
        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
        for thread in threads:
            thread.start()
        seen = 0
        while seen < total:
            for writer, matched in target.ask("check_announced", slot=SLOT, name="kv", timeout=90.0):
                assert matched
                seen += 1
                acknowledged[writer].release()
        for thread in threads:
            thread.join()
        peer.close()
    assert seen == total


def test_within_one_process(open_pair: Any, transport: str) -> None:
    pair: Pair = open_pair(transport, nbytes=SLOT)
    view = memoryview(pair.region)
    generator = np.random.default_rng(0)
    for _ in range(200):
        length = int(generator.integers(1, SLOT))
        np.frombuffer(pair.local, dtype=np.uint8)[:length] = generator.integers(0, 256, length, dtype=np.uint8)
        transfer = pair.client.write(
            pair.peer, pair.local, pair.remote, 0, 0, length, digest=True, notify=length.to_bytes(8, "little")
        )
        (notification,) = pair.server.notifications(timeout=90.0)
        # Looked at before the sender has waited for anything.
        announced = int.from_bytes(notification.payload, "little")
        seen = digest(view[:announced])
        assert transfer.wait().digests is not None
        assert [seen] == list(transfer.digests or [])


@pytest.mark.parametrize("nbytes", [1, 4096])
def test_small_ones_in_a_row(open_pair: Any, transport: str, nbytes: int) -> None:
    """Several transfers in flight at once: each notification finds its own data, whatever the order of the lanes."""
    pair: Pair = open_pair(transport, nbytes=256 * nbytes)
    for index in range(256):
        memoryview(pair.local)[index * nbytes : (index + 1) * nbytes] = bytes([index ^ 0x5A]) * nbytes
    transfers = [
        pair.client.write(pair.peer, pair.local, pair.remote, i * nbytes, i * nbytes, nbytes, notify=bytes([i]))
        for i in range(256)
    ]
    view, seen = memoryview(pair.region), set()
    while len(seen) < 256:
        for notification in pair.server.notifications(timeout=90.0):
            (index,) = notification.payload
            assert bytes(view[index * nbytes : (index + 1) * nbytes]) == bytes([index ^ 0x5A]) * nbytes
            seen.add(index)
    for transfer in transfers:
        transfer.wait()
