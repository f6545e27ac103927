# SPDX-License-Identifier: Apache-2.0
"""Processes that share memory, and what is left of it when one of them stops, dies, forks or starts again."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import descriptors, eventually
from engine_testing.patterns import fill, pattern
from engine_testing.places import shared_mappings
from engine_testing.processes import Target

from moonpool.transfer_engine import MoonpoolError, PeerState, Status, TransferEngine

NBYTES = 8 << 20


def shared_memory_kib() -> int:
    """Return how much memory of this host is shared memory, that of this test included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1])
    raise LookupError("Shmem")


def unix_sockets() -> int:
    inodes = {target[8:-1] for target in descriptors().values() if target.startswith("socket:")}
    lines = Path("/proc/self/net/unix").read_text().splitlines()[1:]
    return sum(line.split()[6] in inodes for line in lines)


# ---------------------------------------------------------------- death


def test_the_death_of_the_owner_leaves_nothing_of_it_here(open_engine: OpenEngine) -> None:
    client = open_engine(transports="shm", listen=None)
    local = client.allocate(NBYTES)
    mappings, before = shared_mappings(), descriptors()
    for _ in range(3):
        with Target({f"kv-{index}": NBYTES for index in range(8)}, transports="shm") as target:
            target.add("copied", NBYTES, "copied")
            peer = client.connect(target.address)
            for name in [*(f"kv-{index}" for index in range(8)), "copied"]:
                client.read(peer, local, peer.regions.wait(name, 90.0)).wait()
            assert shared_mappings() == mappings + 8
            assert client.stats()["regions_mapped"] == 8
            target.kill()
            assert eventually(lambda peer=peer: peer.state is not PeerState.READY)
            assert eventually(lambda: client.stats()["regions_mapped"] == 0)
            assert shared_mappings() == mappings
            peer.close()
    assert eventually(lambda: {fd: target for fd, target in descriptors().items() if before.get(fd) != target} == {})


def test_the_death_of_a_client_leaves_nothing_of_it_here(open_engine: OpenEngine) -> None:
    server = open_engine(transports="shm")
    fill(server.allocate(NBYTES, "mapped"))
    memory = bytearray(pattern(NBYTES))
    server.register(memory, "copied")
    mappings, sockets = shared_mappings(), unix_sockets()
    for _ in range(3):
        with Target(transports="shm", listen=None) as client:
            client.ask("connect", address=server.address)
            for name in ("mapped", "copied"):
                assert client.ask("read", name=name) == {"intact": True, "paths": ["shm"]}
            assert unix_sockets() == sockets + 1
            client.kill()
        assert eventually(lambda: server.stats()["serving"]["lanes"] == 0)
        assert eventually(lambda: unix_sockets() == sockets)
        assert shared_mappings() == mappings


def test_memory_is_given_back_with_its_release_although_a_client_has_it_mapped(open_engine: OpenEngine) -> None:
    """What a client keeps is addresses, not memory: also a stopped client, which never hears of the release."""
    nbytes = 256 << 20
    server = open_engine(transports="shm")
    with Target(transports="shm", listen=None) as client:
        client.ask("connect", address=server.address)
        for _ in range(3):
            region = server.allocate(nbytes, "large")
            memoryview(region)[:] = b"\1" * nbytes
            client.ask("touch", name="large")
            client.pause()
            with_it = shared_memory_kib()
            region.release()
            del region
            # Others on this host may use some meanwhile.
            assert eventually(lambda with_it=with_it: shared_memory_kib() < with_it - nbytes // 1024 // 2)
            client.resume()
        client.ask("disconnect")


# ---------------------------------------------------------------- standstill


def test_a_stopped_client_that_is_at_no_copy_holds_up_nobody(open_engine: OpenEngine) -> None:
    """The patience of these engines is 300 s, longer than a test may take."""
    server = open_engine(transports="shm")
    region = server.allocate(NBYTES, "mapped")
    fill(region)
    copied = server.register(bytearray(pattern(NBYTES)), "copied")
    with Target(transports="shm", listen=None) as client:
        client.ask("connect", address=server.address)
        for name in ("mapped", "copied"):
            client.ask("read", name=name)
        client.pause()
        region.release()
        copied.release()
        server.allocate(NBYTES, "mapped")
        server.close()
        client.resume()
        client.ask("disconnect")


@pytest.mark.parametrize("round_", range(4))
def test_a_client_that_is_stopped_in_the_middle_of_a_copy_is_waited_for_and_not_for_ever(
    open_engine: OpenEngine, round_: int
) -> None:
    """What it then reports as written is there; what it writes after the release goes nowhere."""
    nbytes, block = 256 << 20, 1 << 20
    server = open_engine(transports="shm", progress_timeout=0.3)
    region = server.allocate(nbytes, "kv")
    with Target(transports="shm", listen=None) as client:
        client.ask("connect", address=server.address)
        client.ask("begin_write", name="kv", block=block)
        view = memoryview(region)
        # At another moment in each round.
        assert eventually(lambda: view[(1 + 40 * round_) * block] == pattern(nbytes, seed=1)[(1 + 40 * round_) * block])
        client.pause()
        region.release()
        when_released = bytes(view)
        client.resume()
        written = client.ask("end_write")
        assert bytes(view) == when_released
        assert len(written["statuses"]) == nbytes // block
        for index, status in enumerate(written["statuses"]):
            if status == Status.OK:
                start = index * block
                assert view[start : start + block] == pattern(nbytes, seed=1)[start : start + block]
            else:
                assert status == Status.REGION_RELEASED
        client.ask("disconnect")
    view.release()


# ---------------------------------------------------------------- restart and fork


def test_a_peer_that_starts_again_is_mapped_anew(open_engine: OpenEngine) -> None:
    client = open_engine(transports="shm", listen=None)
    local = client.allocate(NBYTES)
    mappings = shared_mappings()
    with Target({"kv": NBYTES}, transports="shm") as first:
        address = first.address
        peer = client.connect(address)
        old = peer.regions["kv"]
        client.read(peer, local, old).wait()
        first.kill()
        assert eventually(lambda: peer.state is not PeerState.READY)
    with Target({"kv": NBYTES}, transports="shm", listen=address):
        peer.ensure(90.0)
        with pytest.raises(MoonpoolError):
            client.read(peer, local, old).wait()
        memoryview(local)[:] = bytes(NBYTES)
        client.read(peer, local, peer.regions["kv"]).wait()
        assert bytes(local) == pattern(NBYTES)
        assert peer.path == "shm"
        assert eventually(lambda: shared_mappings() == mappings + 1)
        peer.close()
    assert eventually(lambda: shared_mappings() == mappings)


def in_a_child(work: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_of_a_client_has_nothing_of_the_peer(open_engine: OpenEngine) -> None:
    # Memory that this process owns stays with its children.
    own = shared_mappings()
    client = open_engine(transports="shm", listen=None)
    with Target({"kv": NBYTES}, transports="shm") as target:
        peer = client.connect(target.address)
        local = client.allocate(NBYTES)
        client.read(peer, local, peer.regions["kv"]).wait()

        def child() -> None:
            assert shared_mappings() <= own
            assert unix_sockets() == 0

        in_a_child(child)
        client.read(peer, local, peer.regions["kv"]).wait()
        assert peer.path == "shm"
        assert client.stats()["paths_failed"] == 0
        peer.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_of_the_owner_takes_no_memory_along_when_it_ends(open_engine: OpenEngine) -> None:
    """Whatever it drops, the memory is the parent's."""
    server = open_engine(transports="shm")
    regions = [server.allocate(NBYTES, "kv")]
    fill(regions[0])
    with Target(transports="shm", listen=None) as client:
        client.ask("connect", address=server.address)
        assert client.ask("read", name="kv")["intact"]

        def child() -> None:
            assert unix_sockets() == 0
            regions.clear()
            server.close()

        in_a_child(child)
        assert bytes(regions[0]) == pattern(NBYTES)
        assert client.ask("read", name="kv") == {"intact": True, "paths": ["shm"]}
        client.ask("disconnect")


# ---------------------------------------------------------------- many


def test_fifty_clients_map_one_region_at_once(open_engine: OpenEngine) -> None:
    server = open_engine(transports="shm")
    fill(server.allocate(NBYTES, "kv"))
    server.register(bytearray(pattern(NBYTES)), "copied")
    mappings = shared_mappings()
    with Target(transports="shm", listen=None) as clients:
        for name in ("kv", "copied"):
            assert clients.ask("connect_many", address=server.address, count=50, name=name, transports="shm") == 50
    assert eventually(lambda: server.stats()["serving"]["lanes"] == 0)
    assert shared_mappings() == mappings
    region = server.allocate(64, "another")
    region.release()


def test_a_hundred_thousand_regions_are_registered_and_announced(open_engine: OpenEngine) -> None:
    count = 100_000
    server, client = open_engine(transports="shm"), open_engine(transports="shm", listen=None)
    memory = bytearray(4096)
    early = client.connect(server.address or "")
    regions = [server.register(memory, f"region-{index}") for index in range(count)]
    assert server.stats()["regions"] == count
    # Once as they come, and once all together.
    assert eventually(lambda: len(early.regions) == count)
    late = client.connect(server.address or "")
    assert len(late.regions) == count
    local = client.allocate(4096)
    for index in (0, count // 2, count - 1):
        client.read(late, local, late.regions[f"region-{index}"]).wait()
    # Nothing is mapped or asked for before it is used.
    assert client.stats()["regions_not_mapped"] == 3
    assert client.stats()["regions_mapped"] == 0
    for region in regions[:1000]:
        region.release()
    assert eventually(lambda: len(early.regions) == len(late.regions) == count - 1000)


def test_clients_come_and_go_while_regions_do(open_engine: OpenEngine) -> None:
    """Whoever reads gets all of a region's bytes, or hears that it is gone."""
    server = open_engine(transports="shm")
    stop = threading.Event()

    def change() -> None:
        for index in range(200):
            region = server.allocate(1 << 20, f"kv-{index % 4}")
            memoryview(region)[:] = bytes([index % 251]) * (1 << 20)
            if index >= 4:
                stop.wait(0.002)
            region.release()
        stop.set()

    def read(_: int) -> int:
        good = 0
        with TransferEngine(transports="shm", listen=None) as client:
            local = client.allocate(1 << 20)
            while not stop.is_set():
                peer = client.connect(server.address or "")
                for name in [f"kv-{index}" for index in range(4)]:
                    remote = peer.regions.get(name)
                    if remote is None:
                        continue
                    try:
                        client.read(peer, local, remote).wait()
                    except MoonpoolError:
                        continue
                    good += len(set(bytes(local)[::4096]))
                peer.close()
        return good

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read, index) for index in range(2)]
        pool.submit(change).result()
        for reader in reading:
            reader.result()
    assert eventually(lambda: server.stats()["serving"]["lanes"] == 0)
