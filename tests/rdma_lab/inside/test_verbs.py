# SPDX-License-Identifier: Apache-2.0
"""Verbs alone, without the engine: what the tests of the engine can rely on."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pyverbs.device import Context

from rdma_lab.inside.links import DEVICES, LIMIT, Links, run, wait_until
from rdma_lab.inside.peer import PORT, Endpoint, join

SIZE = 1 << 20
SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
OpenPeer = Callable[..., Endpoint]


def some_bytes(seed: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture
def pair(open_peer: OpenPeer) -> tuple[Endpoint, Endpoint]:
    """The two ends of the first link, connected."""
    first, second = open_peer("rxea0"), open_peer("rxea1", psn=0x4321)
    join(first, second)
    return first, second


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_has_an_address_of_each_kind(device: str) -> None:
    with Context(name=device) as context:
        link_local, mapped, nothing = (str(context.query_gid(PORT, index)) for index in range(3))
    subnet, end = {"a": 1, "b": 2}[device[3]], int(device[4]) + 1
    assert link_local.startswith("fe80:")
    assert mapped == f"0000:0000:0000:0000:0000:ffff:0a4d:{subnet:02x}{end:02x}"
    assert set(nothing) == {"0", ":"}


def test_memory_is_registered_and_holds_what_is_put_there(open_peer: OpenPeer) -> None:
    buffer = open_peer("rxea0").register(SIZE)
    data = some_bytes(1)
    buffer.write(data)
    assert buffer.rkey != 0
    assert buffer.read() == data


def test_a_pair_writes_and_reads(pair: tuple[Endpoint, Endpoint]) -> None:
    first, second = pair
    near, far = first.register(SIZE), second.register(SIZE)
    data = some_bytes(2)
    near.write(data)
    first.write(near, far.address, far.rkey)
    first.finish()
    assert far.read() == data

    data = some_bytes(3)
    far.write(data)
    first.read(near, far.address, far.rkey)
    first.finish()
    assert near.read() == data


def test_a_pair_sends_and_hands_over_numbers(pair: tuple[Endpoint, Endpoint]) -> None:
    first, second = pair
    near, far = first.register(4096), second.register(4096)
    near.write(b"hello")
    second.receive(far, length=64, offset=128)
    second.receive(far, length=0)
    first.send(near, length=5)
    first.write_with_immediate(near, far.address, far.rkey, 0x01020304, length=5)
    first.finish(2)
    sent, written = second.finish(2)
    assert (sent.length, sent.immediate) == (5, None)
    assert written.immediate == 0x01020304
    assert far.read(5, 128) == far.read(5) == b"hello"


def test_memory_that_is_not_writable_is_not_written(pair: tuple[Endpoint, Endpoint]) -> None:
    first, second = pair
    near, far = first.register(4096), second.register(4096, writable=False)
    near.write(b"x" * 4096)
    first.write(near, far.address, far.rkey)
    assert first.completions()[0].status == "REM_ACCESS_ERR"
    assert far.read() == bytes(4096)


def test_lost_packets_are_sent_again(pair: tuple[Endpoint, Endpoint], links: Links) -> None:
    first, second = pair
    near, far = first.register(SIZE), second.register(SIZE)
    data = some_bytes(4)
    near.write(data)
    links.netem("a0", "loss", "1%")
    links.netem("a1", "loss", "1%")
    for _ in range(4):
        first.write(near, far.address, far.rkey)
        first.read(near, far.address, far.rkey)
    first.finish(8, limit=40.0)
    assert far.read() == near.read() == data
    assert int(re.findall(r"dropped (\d+)", run("tc", "-s", "qdisc", "show", "dev", "a0"))[0]) > 0


@contextlib.contextmanager
def server(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_perftest_measures_between_two_ports() -> None:
    common = ["ib_write_bw", "-x", "1", "-F", "-n", "100", "-s", "65536", "-p", "18515"]
    with server(*common, "-d", "rxea1") as listening:
        wait_until(lambda: any(f":{18515:04X} " in Path(table).read_text() for table in SOCKETS), "the server listens")
        shown = run(*common, "-d", "rxea0", "10.77.1.2", limit=40.0)
        assert listening.wait(LIMIT) == 0
    assert re.search(r"^ 65536 +100 +[\d.]+ +[\d.]+", shown, re.MULTILINE), shown
