# SPDX-License-Identifier: Apache-2.0
"""What the rdma transport does when the network, a port or the peer fails."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from moonpool import MoonpoolError
from moonpool.transfer_engine import RegionReleasedError, Transfer, TransferEngine, TransportUnavailableError
from rdma_lab.inside.links import Links, wait_until
from rdma_lab.inside.pair import MIB, WAIT, Pair

# More than the emulated machine moves within the time that a test needs to act.
LARGE = 64 * MIB


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(cables: str, **options: Any) -> Pair:
        pairs.append(Pair(cables, **options))
        return pairs[-1]

    try:
        yield make
    finally:
        for pair in pairs:
            pair.close()


def start_large_write(pair: Pair) -> Transfer:
    """Return a transfer of everything of which a part has been moved."""
    transfer = pair.client.write(pair.peer, pair.local, pair.remote, deadline=WAIT)
    wait_until(lambda: pair.moved() > 0 or transfer.done(), "the first bytes")
    assert not transfer.done()
    return transfer


def test_ends_with_different_mtu_agree_on_the_smaller(make_pair: Callable[..., Pair], links: Links) -> None:
    links.mtu("a1", 1500)
    pair = make_pair("a")
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)


def test_every_byte_arrives_though_packets_are_lost(make_pair: Callable[..., Pair], links: Links) -> None:
    links.netem("a0", "loss", "1%")
    links.netem("a1", "loss", "1%")
    pair = make_pair("a", nbytes=4 * MIB)
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)
    pair.local_memory[:] = 0
    pair.client.read(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)


def test_a_transfer_goes_on_over_the_rail_that_is_left(make_pair: Callable[..., Pair], links: Links) -> None:
    pair = make_pair("ab", nbytes=LARGE)
    transfer = start_large_write(pair)
    links.down("a0")
    transfer.wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)
    assert pair.rails()["rxeb0:1"]["written_bytes"] > LARGE // 2
    assert not pair.rails()["rxea0:1"]["up"]
    assert pair.peer.path == "rdma"


def test_without_a_rail_it_goes_on_over_tcp(make_pair: Callable[..., Pair], links: Links) -> None:
    pair = make_pair("ab", nbytes=LARGE, require=None)
    transfer = start_large_write(pair)
    links.down("a0")
    links.down("b0")
    transfer.wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)
    assert "rdma: " in pair.peer.fallback
    assert pair.client.stats()["retries"] > 0


def test_without_a_rail_what_requires_rdma_fails(make_pair: Callable[..., Pair], links: Links) -> None:
    pair = make_pair("a", nbytes=LARGE)
    transfer = start_large_write(pair)
    links.down("a0")
    before = time.monotonic()
    with pytest.raises(MoonpoolError, match="rxea0") as caught:
        transfer.wait(WAIT)
    assert time.monotonic() - before < 20.0
    assert "rdma" in str(caught.value)


def test_a_port_that_is_down_is_named_at_once(make_pair: Callable[..., Pair], links: Links) -> None:
    links.down("a0")
    before = time.monotonic()
    with pytest.raises(TransportUnavailableError, match="rxea0:1: the port is down"):
        make_pair("a")
    assert time.monotonic() - before < 10.0


def test_a_rail_that_comes_back_is_used_again(make_pair: Callable[..., Pair], links: Links) -> None:
    pair = make_pair("a", require=None)
    links.down("a0")
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert np.array_equal(pair.remote_memory, pair.local_memory)
    links.up("a0")
    wait_until(lambda: pair.peer.fallback == "", "the rail to be used again")
    before = pair.moved()
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert pair.moved() - before == 8 * MIB


def test_a_rail_that_was_down_when_the_peer_connected_is_used_once_it_is_back(
    make_pair: Callable[..., Pair], links: Links
) -> None:
    links.down("b0")
    pair = make_pair("ab")
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    assert pair.rails()["rxeb0:1"]["written_bytes"] == 0
    links.up("b0")

    def carries() -> bool:
        pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
        return bool(pair.rails()["rxeb0:1"]["written_bytes"])

    wait_until(carries, "the rail to carry something")
    assert np.array_equal(pair.remote_memory, pair.local_memory)


def test_a_region_released_under_a_transfer_fails_it_and_nothing_else(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("a", nbytes=LARGE)
    other = np.zeros(MIB, np.uint8)
    pair.server.register(other, name="other")
    transfer = start_large_write(pair)
    pair.server_region.release()
    pair.remote_memory[:] = 0
    with pytest.raises(RegionReleasedError):
        transfer.wait(WAIT)
    # Nothing wrote it after the release returned.
    assert not pair.remote_memory.any()
    remote = pair.peer.regions["other"]
    pair.client.write(pair.peer, pair.local, remote, 0, 0, MIB).wait(WAIT)
    assert np.array_equal(other, pair.local_memory[:MIB])


def test_a_cancelled_write_leaves_the_memory_alone(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("a", nbytes=LARGE)
    transfer = start_large_write(pair)
    transfer.cancel()
    wait_until(lambda: transfer.settled, "the transfer to be settled")
    pair.remote_memory[:] = 0
    time.sleep(0.2)
    assert not pair.remote_memory.any()
    pair.client.write(pair.peer, pair.local, pair.remote, 0, 0, MIB).wait(WAIT)
    assert np.array_equal(pair.remote_memory[:MIB], pair.local_memory[:MIB])


SERVER = """
import sys
import numpy as np
from moonpool.transfer_engine import TransferEngine
engine = TransferEngine("server", listen=sys.argv[1], transports="rdma,tcp", rdma_devices="rxea1")
memory = np.full(1 << 20, int(sys.argv[2]), np.uint8)
engine.register(memory, name="kv")
print(engine.address, flush=True)
sys.stdin.read()
"""


@contextmanager
def server_process(listen: str, fill: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server in a process of its own; killed at the end if it was not before."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, listen, str(fill)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def test_a_peer_that_was_killed_and_came_back_is_used_again() -> None:
    with TransferEngine("client", transports="rdma,tcp", require="rdma", rdma_devices="rxea0") as client:
        local = np.zeros(MIB, np.uint8)
        region = client.register(local)
        with server_process("127.0.0.1:0", 1) as (address, process):
            peer = client.connect(address, timeout=WAIT)
            client.read(peer, region, peer.regions["kv"]).wait(WAIT)
            assert (local == 1).all()
            process.kill()
        with server_process(address, 2):
            peer.ensure(timeout=WAIT)
            client.read(peer, region, peer.regions["kv"]).wait(WAIT)
            assert (local == 2).all()


def test_idle_engines_use_no_cpu(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("ab")
    pair.client.write(pair.peer, pair.local, pair.remote).wait(WAIT)
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(3.0)
    assert time.process_time() - before < 0.05
