# SPDX-License-Identifier: Apache-2.0
"""T11.

What people met: the chosen protocol argument was ignored; people got RDMA errors after asking for TCP, or TCP at
1.8 GB/s after asking for RDMA.

What must happen instead: `transports=` is honoured exactly, every fallback is visible, `require=` makes it fatal.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.processes import Target

from moonpool.transfer_engine import TransferEngine, TransportUnavailableError, probe


def moved(engine: TransferEngine) -> dict[str, int]:
    """Bytes read over each path that was used."""
    counted = {path: counters["read_bytes"] for path, counters in engine.stats()["paths"].items()}
    return {path: nbytes for path, nbytes in counted.items() if nbytes > 0}


@pytest.mark.parametrize(
    ("theirs", "ours", "path"),
    [
        ("auto", "auto", "local"),
        ("local,tcp", "tcp,local", "local"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
        ("tcp", "tcp", "tcp"),
        ("local", "auto", "local"),
        ("local", "local", "local"),
        ("shm,tcp", "auto", "shm"),
        ("auto", "tcp,shm", "shm"),
    ],
)
def test_within_one_process(open_engine: OpenEngine, theirs: str, ours: str, path: str) -> None:
    server, client = open_engine(transports=theirs), open_engine(transports=ours, listen=None)
    server.allocate(4096, name="kv")
    peer = client.connect(server.address or "")
    client.read(peer, client.allocate(4096), peer.regions["kv"]).wait()
    assert peer.path == path
    assert moved(client) == {path: 4096}


@pytest.mark.parametrize(
    ("ours", "path", "fallback"),
    [
        ("auto", "shm", "local: the peer is another process"),
        ("tcp", "tcp", ""),
        ("local,tcp", "tcp", "local: the peer is another process"),
    ],
)
def test_between_processes_the_fallback_is_visible(
    open_engine: OpenEngine, ours: str, path: str, fallback: str
) -> None:
    client = open_engine(transports=ours, listen=None)
    with Target({"kv": 4096}) as target:
        peer = client.connect(target.address)
        client.read(peer, client.allocate(4096), peer.regions["kv"]).wait()
        assert peer.path == path
        assert peer.fallback == fallback
        assert moved(client) == {path: 4096}
        peer.close()


@pytest.mark.parametrize("options", [{"transports": "local"}, {"require": "local"}])
def test_what_cannot_be_had_between_processes_is_refused(open_engine: OpenEngine, options: dict[str, Any]) -> None:
    client = open_engine(listen=None, **options)
    with Target({"kv": 4096}) as target, pytest.raises(TransportUnavailableError) as caught:
        client.connect(target.address)
    assert "local" in str(caught.value)
    assert caught.value.hint
    assert not caught.value.retryable


@pytest.mark.parametrize(("ours", "theirs"), [("tcp", "local"), ("local", "tcp")])
def test_nothing_in_common_is_refused(open_engine: OpenEngine, ours: str, theirs: str) -> None:
    server, client = open_engine(transports=theirs), open_engine(transports=ours, listen=None)
    with pytest.raises(TransportUnavailableError) as caught:
        client.connect(server.address or "")
    # Says what each side offers.
    assert ours in str(caught.value)
    assert theirs in str(caught.value)


@pytest.mark.parametrize("require", ["local", "shm", "tcp"])
def test_a_required_transport_is_used(open_engine: OpenEngine, require: str) -> None:
    server, client = open_engine(), open_engine(require=require, listen=None)
    server.allocate(4096, name="kv")
    peer = client.connect(server.address or "")
    client.read(peer, client.allocate(4096), peer.regions["kv"]).wait()
    assert peer.path == require
    assert moved(client) == {require: 4096}


def test_a_required_transport_that_the_peer_does_not_offer(open_engine: OpenEngine) -> None:
    server = open_engine(transports="tcp")
    with pytest.raises(TransportUnavailableError, match="local"):
        open_engine(require="local", listen=None).connect(server.address or "")


@pytest.mark.parametrize("name", ["quic", "sysv", "tcp4", "TCP"])
@pytest.mark.parametrize("option", ["transports", "require"])
def test_a_transport_of_no_such_name_is_refused(option: str, name: str) -> None:
    with pytest.raises(TransportUnavailableError) as caught:
        TransferEngine(**{option: name})  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert "tcp" in caught.value.hint


@pytest.mark.parametrize("options", [{"transports": "rdma"}, {"transports": "rdma,tcp"}, {"require": "rdma"}])
def test_rdma_is_not_replaced_where_it_is_missing(options: dict[str, Any]) -> None:
    (rdma,) = (transport for transport in probe() if transport.name == "rdma")
    if rdma.available:
        pytest.skip("this host has RDMA devices")
    with pytest.raises(TransportUnavailableError, match="rdma") as caught:
        TransferEngine(**options)
    assert rdma.reason in str(caught.value)
