# SPDX-License-Identifier: Apache-2.0
"""From GPU to GPU in two processes of one host, and what happens when one of them ends, releases or cannot."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from cuda_testing.owner import Owner
from engine_testing.leaks import eventually
from engine_testing.patterns import pattern
from engine_testing.places import why_no_unshare
from fake_cuda import FakeCuda

from moonpool.transfer_engine import MoonpoolError, PeerState, Region, RegionReleasedError, TransferEngine

from .conftest import OpenEngine

SIZE = 5 * (1 << 20) + 4321
AUTO = "shm,cuda_ipc,tcp"
_NAMESPACE = ("--pid", "--fork", "--kill-child")
_WHY_NO_NAMESPACE = why_no_unshare(*_NAMESPACE)


@pytest.fixture
def owner(cuda: FakeCuda) -> Iterator[Owner]:
    with Owner(transports=AUTO) as program:
        yield program


@dataclass
class Here:
    """Memory of a GPU of this process, registered."""

    cuda: FakeCuda
    region: Region

    @property
    def content(self) -> bytes:
        return self.cuda.peek(self.region.address, self.region.nbytes)

    @content.setter
    def content(self, value: bytes) -> None:
        self.cuda.poke(self.region.address, value)


def open_here(
    open_cuda_engine: OpenEngine, cuda: FakeCuda, nbytes: int = SIZE, **options: object
) -> tuple[TransferEngine, Here]:
    engine = open_cuda_engine("client", **{"transports": AUTO, "listen": None, **options})
    memory = cuda.memory(bytes(nbytes))
    return engine, Here(cuda, engine.register(memory))


def paths(engine: TransferEngine) -> dict[str, int]:
    """Return how many transfers each path has completed, without those that have none."""
    completed = {name: path["completed"] for name, path in engine.stats()["paths"].items()}
    return {name: count for name, count in completed.items() if count}


def text_of(error: MoonpoolError) -> str:
    return f"{error} {error.cause}"


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("parts", [0, 4], ids=["allocated", "mapped"])
@pytest.mark.parametrize("offset", [0, 4096 + 256])
def test_every_byte_goes_both_ways(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine, parts: int, offset: int
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE, seed=1, offset=offset, parts=parts)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    engine.read(peer, here.region, remote).wait()
    assert here.content == pattern(SIZE, 1)
    here.content = pattern(SIZE, 2)
    engine.write(peer, here.region, remote).wait()
    assert owner.ask("digest", name="kv") == hashlib.blake2b(pattern(SIZE, 2)).hexdigest()
    assert paths(engine) == {"cuda_ipc": 2}, peer.fallback
    assert engine.stats()["regions_imported"] == 1


def test_scattered_pieces_take_a_few_calls_of_the_driver(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE, seed=3)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    engine.read(peer, here.region, remote, lengths=1).wait()
    source, piece = pattern(SIZE, 3), 1000
    calls = []
    for count in (10, 500):
        here.content = bytes(SIZE)
        there = [(index * 7919 * piece) % (SIZE - piece) for index in range(count)]
        cuda.forget_calls()
        engine.read(peer, here.region, remote, [2 * piece * i for i in range(count)], there, piece).wait()
        # How often the end is looked for depends on time alone.
        calls.append(cuda.all_calls() - cuda.calls("cuEventQuery") - 2 * cuda.calls("cuCtxPushCurrent_v2"))
        arrived = here.content
        for index, at in enumerate(there):
            assert arrived[2 * piece * index : 2 * piece * index + piece] == source[at : at + piece]
            assert arrived[2 * piece * index + piece : 2 * piece * (index + 1)] == bytes(piece)
    assert calls[1] <= calls[0] + 2, "not one for each piece"


def test_a_region_is_imported_once_and_given_back(owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    cuda.forget_calls()
    for _ in range(3):
        engine.read(peer, here.region, remote).wait()
    assert cuda.calls("cuIpcOpenMemHandle_v2") == 1
    owner.ask("release", name="kv")
    assert eventually(lambda: cuda.alive("imports") == 0)
    assert engine.stats()["regions_imported"] == 0
    with pytest.raises(MoonpoolError) as caught:
        engine.read(peer, here.region, remote).wait()
    assert caught.value.code in ("REGION_RELEASED", "REGION_UNKNOWN"), text_of(caught.value)


def test_a_device_that_hangs_does_not_keep_an_engine_from_closing(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda, progress_timeout=0.5)
    peer = engine.connect(owner.address)
    for name in ("kv", "more", "last"):
        owner.ask("add", name=name, nbytes=SIZE)
        engine.read(peer, here.region, peer.regions.wait(name, 60.0)).wait()
    assert cuda.alive("imports") == 3
    busy = cuda.memory(bytes(32))
    stream = cuda.stream()
    with cuda.held():
        # Work of the program, for which the driver waits before it closes memory of other processes.
        cuda.call("cuMemcpyDtoDAsync_v2", busy.address, busy.address + 16, 16, ctypes.c_void_p(stream))
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 10
        assert cuda.alive("imports") == 3
    assert eventually(lambda: cuda.alive("imports") == 0)
    cuda.call("cuStreamSynchronize", ctypes.c_void_p(stream))
    cuda.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
    cuda.free(busy.address)


def test_more_regions_than_are_kept_make_room_for_each_other(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    count, nbytes = 2300, 256
    owner.ask("add_many", count=count, nbytes=nbytes)
    peer = engine.connect(owner.address)
    peer.regions.wait(str(count - 1), 60.0)
    there = [peer.regions[str(index)] for index in range(count)]
    for first in range(0, count, 100):
        batch = range(first, min(first + 100, count))
        engine.read(peer, [(here.region, index * nbytes, there[index], 0, nbytes) for index in batch]).wait()
    assert here.content[: count * nbytes] == pattern(count * nbytes)
    assert engine.stats()["regions_imported"] <= 2048
    assert cuda.alive("imports") == 1, "they are of one allocation"
    here.content = bytes(SIZE)
    engine.read(peer, here.region, there[0], 0, 0, nbytes).wait()
    assert here.content[:nbytes] == pattern(count * nbytes)[:nbytes]
    assert list(paths(engine)) == ["cuda_ipc"], peer.fallback


def test_memory_that_was_freed_and_came_back_is_another_region(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    peer = engine.connect(owner.address)
    addresses = set()
    for round_ in range(3):
        addresses.add(owner.ask("add", name=f"kv {round_}", nbytes=SIZE, seed=round_))
        remote = peer.regions.wait(f"kv {round_}", 60.0)
        engine.read(peer, here.region, remote).wait()
        assert here.content == pattern(SIZE, round_)
        owner.ask("release", name=f"kv {round_}")
        owner.ask("free", name=f"kv {round_}")
    assert len(addresses) == 1, "the address came back, which is what this is about"
    assert paths(engine) == {"cuda_ipc": 3}


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_its_owner_freed_is_not_imported(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine, again: bool
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    owner.ask("free", name="kv")
    if again:
        owner.ask("add", name="other", nbytes=SIZE, seed=1)
    for _ in range(2):
        with pytest.raises(RegionReleasedError):
            engine.read(peer, here.region, remote).wait()
    assert here.content == bytes(SIZE)


def test_once_an_owner_knows_that_memory_was_freed_nobody_uses_it(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    engine.read(peer, here.region, remote).wait()
    assert list(paths(engine)) == ["cuda_ipc"]
    owner.ask("free", name="kv")
    other, there = open_here(open_cuda_engine, cuda, transports="tcp")
    second = other.connect(owner.address)
    with pytest.raises(RegionReleasedError):
        other.read(second, there.region, second.regions.wait("kv", 60.0)).wait()
    here.content = bytes(SIZE)
    for start in (engine.read, engine.write):
        with pytest.raises(RegionReleasedError):
            start(peer, here.region, remote).wait()
    assert here.content == bytes(SIZE)


def test_a_region_that_peers_may_not_write_is_not_written(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE, seed=1, writable=False)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    with pytest.raises(MoonpoolError) as caught:
        engine.write(peer, here.region, remote).wait()
    assert caught.value.code == "REGION_READ_ONLY"
    engine.read(peer, here.region, remote).wait()
    assert here.content == pattern(SIZE, 1)


# ---------------------------------------------------------------- ends


def test_the_death_of_the_owner_is_no_wrong_byte_and_leaves_nothing(
    cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    for _ in range(2):
        with Owner(transports=AUTO) as owner:
            owner.ask("add", name="kv", nbytes=SIZE, seed=1)
            peer = engine.connect(owner.address)
            remote = peer.regions.wait("kv", 60.0)
            engine.read(peer, here.region, remote).wait()
            with cuda.held():
                moving = engine.read(peer, here.region, remote)
                assert not moving.done()
                owner.kill()
                assert eventually(lambda peer=peer: peer.state is not PeerState.READY)
            with pytest.raises(MoonpoolError) as caught:
                moving.wait()
            assert caught.value.code in ("PEER_LOST", "CONNECT"), text_of(caught.value)
            assert eventually(lambda: cuda.alive("imports") == 0)
            peer.close()


def test_the_death_of_a_client_in_a_copy_lets_the_owner_go_on(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    server = open_cuda_engine("server", transports=AUTO)
    memory = cuda.memory(bytes(SIZE))
    region = server.register(memory, "kv")
    with Owner(transports=AUTO, listen=None) as client:
        client.ask("add", name="here", nbytes=SIZE, seed=4)
        client.ask("connect", address=server.address)
        client.ask("write", remote="kv", nbytes=1000)
        client.ask("hold", on=True)
        client.ask("write", remote="kv", nbytes=1000, wait=False)
        client.kill()
    region.release()
    assert cuda.peek(memory.address, 1000) == pattern(1000, 4)


def test_a_release_waits_for_a_client_that_is_in_a_copy(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    server = open_cuda_engine("server", transports=AUTO, progress_timeout=0.5)
    memory = cuda.memory(bytes(SIZE))
    region = server.register(memory, "kv")
    with Owner(transports=AUTO, listen=None) as client:
        client.ask("add", name="here", nbytes=SIZE, seed=4)
        client.ask("connect", address=server.address)
        client.ask("write", remote="kv", nbytes=1000)
        client.ask("hold", on=True)
        client.ask("write", remote="kv", nbytes=1000, wait=False)
        time.sleep(0)  # the request is answered when the copy is queued
        with pytest.raises(MoonpoolError) as caught:
            region.release()
        assert caught.value.code == "REGION_BUSY"
        client.ask("hold", on=False)
        region.release()


def test_a_context_that_died_fails_its_transfers_and_nothing_else(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE, seed=1)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    engine.read(peer, here.region, remote).wait()
    cuda.set("fail=execute:1:700")
    with pytest.raises(MoonpoolError) as caught:
        engine.read(peer, here.region, remote).wait()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in text_of(caught.value)
    local = engine.allocate(4096)
    engine.read(peer, local, remote, lengths=4096).wait()
    assert bytes(local) == pattern(SIZE, 1)[:4096]
    cuda.kill_context(0, 0)


# ---------------------------------------------------------------- another way


def test_memory_that_cannot_be_shared_is_staged_and_says_why(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE, seed=1)
    peer = engine.connect(owner.address)
    cuda.set("fail=cuIpcOpenMemHandle_v2:1:205")
    engine.read(peer, here.region, peer.regions.wait("kv", 60.0)).wait()
    assert here.content == pattern(SIZE, 1)
    assert set(paths(engine)) == {"tcp"}
    assert "cuda_ipc: the driver does not open the peer's memory: CUDA_ERROR_MAP_FAILED" in peer.fallback
    assert engine.stats()["regions_not_imported"] == 1


def test_mapped_memory_without_descriptors_is_staged_and_says_why(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda)
    owner.ask("add", name="kv", nbytes=SIZE, seed=1, parts=3, shareable=False)
    peer = engine.connect(owner.address)
    engine.read(peer, here.region, peer.regions.wait("kv", 60.0)).wait()
    assert here.content == pattern(SIZE, 1)
    assert "cuda_ipc: memory that was allocated without a descriptor cannot be shared" in peer.fallback
    assert set(paths(engine)) == {"tcp"}


@pytest.mark.skipif(bool(_WHY_NO_NAMESPACE), reason=_WHY_NO_NAMESPACE)
@pytest.mark.parametrize("parts", [0, 3], ids=["allocated", "mapped"])
def test_between_containers_that_do_not_see_each_others_processes(
    cuda: FakeCuda, open_cuda_engine: OpenEngine, parts: int
) -> None:
    """The driver's handles name a process there; descriptors do not."""
    engine, here = open_here(open_cuda_engine, cuda)
    with Owner(before=("unshare", *_NAMESPACE), transports=AUTO) as owner:
        owner.ask("add", name="kv", nbytes=SIZE, seed=1, parts=parts)
        peer = engine.connect(owner.address)
        remote = peer.regions.wait("kv", 60.0)
        engine.read(peer, here.region, remote).wait()
        assert here.content == pattern(SIZE, 1)
        here.content = pattern(SIZE, 2)
        engine.write(peer, here.region, remote).wait()
        assert owner.ask("digest", name="kv") == hashlib.blake2b(pattern(SIZE, 2)).hexdigest()
        assert paths(engine) == {"cuda_ipc" if parts else "tcp": 2}, peer.fallback
        assert ("cuda_ipc: the driver does not open the peer's memory" in peer.fallback) == (not parts)


def test_without_staging_it_is_an_error_that_says_why(
    owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine
) -> None:
    engine, here = open_here(open_cuda_engine, cuda, cuda_staging=False)
    owner.ask("add", name="kv", nbytes=SIZE, seed=1)
    peer = engine.connect(owner.address)
    cuda.set("fail=cuIpcOpenMemHandle_v2:1:205")
    with pytest.raises(MoonpoolError) as caught:
        engine.read(peer, here.region, peer.regions.wait("kv", 60.0)).wait()
    assert caught.value.code == "TRANSPORT_UNAVAILABLE"
    assert "CUDA_ERROR_MAP_FAILED" in text_of(caught.value)


def test_under_require_that_is_an_error(owner: Owner, cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    engine, here = open_here(open_cuda_engine, cuda, require="cuda_ipc")
    owner.ask("add", name="kv", nbytes=SIZE, seed=1)
    peer = engine.connect(owner.address)
    remote = peer.regions.wait("kv", 60.0)
    cuda.set("fail=cuIpcOpenMemHandle_v2:1:205")
    with pytest.raises(MoonpoolError) as caught:
        engine.read(peer, here.region, remote).wait()
    assert caught.value.code == "TRANSPORT_UNAVAILABLE", text_of(caught.value)


def test_a_gpu_that_this_process_does_not_see(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> None:
    with Owner("devices=4", transports=AUTO) as owner:
        engine, here = open_here(open_cuda_engine, cuda)
        owner.ask("add_on", name="kv", nbytes=SIZE, seed=1, device=3)
        peer = engine.connect(owner.address)
        engine.read(peer, here.region, peer.regions.wait("kv", 60.0)).wait()
        assert here.content == pattern(SIZE, 1)
        assert "is not visible to this process" in peer.fallback
        assert set(paths(engine)) == {"tcp"}
