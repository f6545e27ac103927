# SPDX-License-Identifier: Apache-2.0
"""Engines against a peer over pyverbs, which is not our code: each end as the client and as the server."""

from __future__ import annotations

import time

import numpy as np
import pytest

from moonpool.transfer_engine import TransferEngine
from rdma_lab.inside.links import wait_until
from rdma_lab.inside.pair import MIB, WAIT
from rdma_lab.inside.stranger import REGION_RELEASED, REGION_UNKNOWN, StrangeClient, StrangeServer


def random_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


def engine(name: str, device: str) -> TransferEngine:
    return TransferEngine(name, transports="rdma,tcp", rdma_devices=device, connect_timeout=20.0)


def test_a_stranger_writes_and_reads_a_region_by_its_key() -> None:
    with engine("server", "rxea1") as server:
        # Not at the start of a page, so that its addresses for the device do not begin at 0.
        memory = np.zeros(MIB + 4096, np.uint8)[100 : 100 + MIB]
        server.register(memory, name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            assert keys.length == MIB
            assert keys.start < 4096  # says nothing of where the memory is
            sent = client.endpoint.register(65536)
            sent.write(random_bytes(65536, 1))
            client.endpoint.write(sent, keys.start + 5000, keys.rkeys[0])
            client.endpoint.finish()
            assert memory[5000 : 5000 + 65536].tobytes() == sent.read()
            memory[:] = np.frombuffer(random_bytes(MIB, 2), np.uint8)
            got = client.endpoint.register(65536)
            client.endpoint.read(got, keys.start + MIB - 65536, keys.rkeys[0])
            client.endpoint.finish()
            assert got.read() == memory[-65536:].tobytes()


@pytest.mark.parametrize("offset", [-1, MIB - 4095, MIB, 1 << 40])
def test_what_is_outside_the_region_is_refused_by_the_device(offset: int) -> None:
    with engine("server", "rxea1") as server:
        memory = np.zeros(3 * MIB, np.uint8)
        server.register(memory[MIB : 2 * MIB], name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            sent = client.endpoint.register(4096)
            sent.write(b"x" * 4096)
            client.endpoint.write(sent, (keys.start + offset) % (1 << 64), keys.rkeys[0])
            assert client.endpoint.completions()[0].status == "REM_ACCESS_ERR"
            assert not memory.any()


def test_a_region_that_is_read_only_is_only_read() -> None:
    with engine("server", "rxea1") as server:
        memory = np.frombuffer(random_bytes(4096, 3), np.uint8).copy()
        server.register(memory, name="kv", writable=False)
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            got = client.endpoint.register(4096)
            client.endpoint.read(got, keys.start, keys.rkeys[0])
            client.endpoint.finish()
            assert got.read() == memory.tobytes()
            before = memory.copy()
            client.endpoint.write(client.endpoint.register(4096), keys.start, keys.rkeys[0])
            assert client.endpoint.completions()[0].status == "REM_ACCESS_ERR"
            assert np.array_equal(memory, before)


def test_a_key_is_of_no_use_once_the_region_is_released() -> None:
    with engine("server", "rxea1") as server:
        memory = np.zeros(4096, np.uint8)
        region = server.register(memory, name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            region.release()
            assert client.find(client.regions["kv"].key)[0] == REGION_RELEASED
            assert client.find(12345)[0] == REGION_UNKNOWN
            client.endpoint.write(client.endpoint.register(4096), keys.start, keys.rkeys[0])
            assert client.endpoint.completions()[0].status == "REM_ACCESS_ERR"


def test_a_queue_pair_is_of_no_use_once_its_socket_is_closed() -> None:
    with engine("server", "rxea1") as server:
        memory = np.zeros(4096, np.uint8)
        server.register(memory, name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            assert server.stats()["rails"][0]["queue_pairs"] == 1
            client.lane.close()
            wait_until(lambda: server.stats()["rails"][0]["queue_pairs"] == 0, "the queue pair to end")
            sent = client.endpoint.register(4096)
            sent.write(b"x" * 4096)
            client.endpoint.write(sent, keys.start, keys.rkeys[0])
            time.sleep(1.0)  # the device tries again and again
            assert not memory.any()


def test_an_engine_writes_and_reads_memory_that_a_stranger_registered() -> None:
    with StrangeServer("rxea1", MIB) as server, engine("client", "rxea0") as client:
        local = np.frombuffer(random_bytes(MIB, 4), np.uint8).copy()
        region = client.register(local)
        peer = client.connect(server.address, timeout=WAIT)
        assert peer.path == "rdma"
        client.write(peer, region, peer.regions["kv"]).wait(WAIT)
        assert server.buffer.read() == local.tobytes()
        there = random_bytes(MIB, 5)
        server.buffer.write(there)
        client.read(peer, region, peer.regions["kv"]).wait(WAIT)
        assert local.tobytes() == there
        assert not server.errors


def test_a_notification_waits_for_the_marks_of_its_bytes() -> None:
    with engine("server", "rxea1") as server:
        server.register(np.zeros(4096, np.uint8), name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            sent = client.endpoint.register(4096)
            client.notify(1, b"first", {1: 2})
            client.notify(2, b"second")
            client.endpoint.write_with_immediate(sent, keys.start, keys.rkeys[0], 0)
            client.endpoint.finish()
            assert server.notifications(0.5) == []  # nor does the second one overtake the first
            client.endpoint.write_with_immediate(sent, keys.start, keys.rkeys[0], 0)
            arrived = server.notifications(WAIT)
            arrived += server.notifications(WAIT) if len(arrived) == 1 else []
            assert [bytes(one.payload) for one in arrived] == [b"first", b"second"]
            client.notify(3, b"never marked", {1: 100})
            assert server.notifications(0.2) == []
            client.lane.close()
            # What had been sent over the lane is in place once its queue pair is gone.
            assert [bytes(one.payload) for one in server.notifications(WAIT)] == [b"never marked"]


def test_more_marks_than_receives_are_posted_arrive() -> None:
    with engine("server", "rxea1") as server:
        server.register(np.zeros(4096, np.uint8), name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            keys = client.keys_of("kv")
            sent = client.endpoint.register(16)
            for _ in range(10):
                for _ in range(40):
                    client.endpoint.write_with_immediate(sent, keys.start, keys.rkeys[0], 0)
                client.endpoint.finish(40)
            client.notify(1, b"all", {1: 400})
            assert len(server.notifications(WAIT)) == 1


def test_a_message_on_a_queue_pair_that_takes_only_marks_ends_its_lane() -> None:
    with engine("server", "rxea1") as server:
        server.register(np.zeros(4096, np.uint8), name="kv")
        with StrangeClient(str(server.address), "rxea0") as client:
            client.endpoint.send(client.endpoint.register(64))
            wait_until(lambda: server.stats()["rails"][0]["queue_pairs"] == 0, "the queue pair to end")


@pytest.mark.parametrize("count", [1, 700])
def test_an_engine_marks_the_bytes_of_a_notification_and_no_others(count: int) -> None:
    with StrangeServer("rxea1", MIB) as server, engine("client", "rxea0") as client:
        region = client.register(np.zeros(MIB, np.uint8))
        peer = client.connect(server.address, timeout=WAIT)
        kv = peer.regions["kv"]
        client.write(peer, region, kv).wait(WAIT)
        client.read(peer, region, kv, notify=b"read").wait(WAIT)
        assert sum(server.marks()) == 0
        offsets = np.arange(count) * 1024
        client.write(peer, region, kv, offsets, offsets, 512, notify=b"x").wait(WAIT)
        assert server.notified[0] == (b"read", {})
        payload, marks = server.notified[1]
        assert payload == b"x"
        assert sum(server.marks()) == sum(marks.values()) >= 1
        assert not server.errors
