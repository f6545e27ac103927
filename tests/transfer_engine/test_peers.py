# SPDX-License-Identifier: Apache-2.0
"""Connecting to other engines, and what they offer."""

from __future__ import annotations

import copy
import pickle
import socket
import threading
from typing import Any

import pytest
from engine_testing.fixtures import OpenEngine, Pair
from engine_testing.leaks import eventually
from engine_testing.networks import mute_host, unaccepting_host
from engine_testing.patterns import fill, pattern
from engine_testing.processes import Target

from moonpool.transfer_engine import (
    AddressError,
    ArgumentTypeError,
    AuthenticationError,
    ClosedError,
    ConnectError,
    InvalidArgumentError,
    LimitError,
    Peer,
    PeerLostError,
    PeerState,
    RegionNotFoundError,
    RegionStaleError,
    RemoteRegion,
    TransportUnavailableError,
)
from moonpool.transfer_engine.peers import degradation
from moonpool.transfer_engine.testing import FaultProxy


def test_what_a_peer_tells_about_itself(pair: Pair, transport: str) -> None:
    peer = pair.peer
    assert (peer.name, peer.address, peer.path, peer.state) == (
        "server", pair.server.address, transport, PeerState.READY,
    )  # fmt: skip
    assert peer.incarnation == pair.server.incarnation
    assert repr(peer) == f"<Peer 'server' at {peer.address} over {transport}, ready, 1 regions>"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "moonpool.transfer_engine"]


def test_a_path_that_is_not_the_cheapest_is_logged_once(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server = open_engine("server", transports="tcp")
    peer = open_engine("client", transports="auto", listen=None).connect(server.address or "")
    peer.ensure()
    (warning,) = warnings_of(caplog)
    assert caplog.records[0].levelname == "WARNING"
    assert f"'server' at {server.address} is reached over tcp" in warning
    assert warning.endswith(": " + peer.fallback)
    assert "shm: the peer does not offer it" in warning


def test_a_new_reason_is_logged_too(open_engine: OpenEngine, caplog: pytest.LogCaptureFixture) -> None:
    first = open_engine("server", transports="shm,tcp")
    client = open_engine("client", transports="shm,tcp", listen=None)
    with FaultProxy(first.address or "") as network:
        peer = client.connect(network.address)
        assert (peer.path, warnings_of(caplog)) == ("shm", [])
        network.retarget(open_engine("server", transports="tcp").address or "")
        first.close()
        assert eventually(lambda: peer.state is PeerState.LOST)
        peer.ensure()
    (warning,) = warnings_of(caplog)
    assert "is reached over tcp" in warning


def test_where_the_peer_is_needs_no_warning(open_engine: OpenEngine, caplog: pytest.LogCaptureFixture) -> None:
    client = open_engine("client", transports="auto", listen=None)
    with Target() as target:
        peer = client.connect(target.address)
        assert peer.fallback == "local: the peer is another process"
        peer.close()
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("fallback", "left"),
    [
        ("", ""),
        ("local: the peer is another process; shm: the peer is on another host", ""),
        ("shm: the peer is on another host", ""),
        (
            "local: the peer is another process; shm: the peer runs as another user",
            "shm: the peer runs as another user",
        ),
        ("cuda_ipc: the peer is in this process", ""),
        ("local: the peer is another process; cuda_ipc: the peer does not offer it", ""),
        ("cuda_ipc: the peer is on another host; rdma: no port is up; see dmesg", "rdma: no port is up; see dmesg"),
    ],
)
def test_what_of_a_fallback_is_a_degradation(fallback: str, left: str) -> None:
    assert degradation(fallback) == left


def test_the_regions_of_a_peer_are_a_mapping(pair: Pair) -> None:
    pair.server.allocate(128, name="a")
    pair.server.register(bytes(64), name="z", writable=False)
    pair.server.allocate(64)  # without a name: private
    pair.peer.regions.wait("z", 90.0)
    regions = pair.peer.regions
    assert list(regions) == ["a", "kv", "z"]
    assert len(regions) == 3
    assert "a" in regions
    assert "b" not in regions
    assert [region.nbytes for region in regions.values()] == [128, 1 << 16, 64]
    remote = regions["z"]
    assert (remote.name, remote.nbytes, remote.writable) == ("z", 64, False)
    assert remote.incarnation == pair.server.incarnation
    assert repr(remote) == f"<RemoteRegion 'z' 64 bytes, read-only, of {remote.incarnation[:8]}>"


def test_handles_are_values(pair: Pair) -> None:
    again = pair.peer.regions["kv"]
    assert again == pair.remote
    assert hash(again) == hash(pair.remote)
    assert again is not pair.remote
    pair.server.allocate(64, name="other")
    assert pair.peer.regions.wait("other", 90.0) != again
    assert again != "kv"
    assert (again.key, again.generation) == (pair.region.key, pair.region.generation)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "deep", "pickle"]
)
def test_handles_are_copied_and_pickled_as_values(pair: Pair, again: Any) -> None:
    fill(pair.region)
    constant = pair.server.register(bytes(64), name="x" * 255, writable=False)
    for remote in (pair.remote, pair.peer.regions.wait("x" * 255, 90.0)):
        other = again(remote)
        assert type(other) is RemoteRegion
        assert other == remote
        assert (other.name, other.nbytes, other.writable) == (remote.name, remote.nbytes, remote.writable)
        assert repr(other) == repr(remote)
    pair.client.read(pair.peer, pair.local, again(pair.remote)).wait()
    assert bytes(pair.local) == pattern(pair.local.nbytes)
    constant.release()


def test_a_damaged_handle_is_refused(pair: Pair) -> None:
    restore, (kind, *numbers, incarnation, name) = pair.remote.__reduce__()  # type: ignore[misc]
    for arguments in (
        (object, *numbers, incarnation, name),
        (kind, *numbers, incarnation[:15], name),
        (kind, *numbers, incarnation, bytes(256)),
    ):
        with pytest.raises(InvalidArgumentError):
            restore(*arguments)  # type: ignore[operator]


def test_what_lives_in_this_process_cannot_be_copied(pair: Pair) -> None:
    plan = pair.client.prepare(pair.peer, pair.local, pair.remote, 0, 0, 64)
    transfer = pair.client.post(plan)
    for each in (pair.client, pair.local, pair.peer, plan, transfer):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ArgumentTypeError, match=f"a {type(each).__name__} cannot be copied") as caught:
                call(each)
            assert caught.value.hint
    transfer.wait()


@pytest.mark.parametrize(("asked", "hint"), [("kv-layer", "'kv-layers'"), ("nothing", "one of 'kv', 'kv-layers'")])
def test_an_unknown_region_names_the_nearest(pair: Pair, asked: str, hint: str) -> None:
    pair.server.allocate(64, name="kv-layers")
    pair.peer.regions.wait("kv-layers", 90.0)
    with pytest.raises(RegionNotFoundError) as caught:
        pair.peer.regions[asked]
    assert caught.value.hint == hint
    assert asked in str(caught.value)


def test_a_peer_without_regions_says_so(open_engine: OpenEngine) -> None:
    server, client = open_engine(), open_engine(listen=None)
    peer = client.connect(server.address or "")
    assert (len(peer.regions), list(peer.regions)) == (0, [])
    with pytest.raises(RegionNotFoundError, match="wait"):
        peer.regions["kv"]


def test_waiting_for_a_region_that_comes(pair: Pair) -> None:
    def announce() -> None:
        assert eventually(waiting.is_set)
        pair.server.allocate(64, name="late")

    waiting = threading.Event()
    thread = threading.Thread(target=announce)
    thread.start()
    waiting.set()
    assert pair.peer.regions.wait("late", 90.0).nbytes == 64
    thread.join()


def test_waiting_for_a_region_that_does_not_come(pair: Pair) -> None:
    with pytest.raises(RegionNotFoundError):
        pair.peer.regions.wait("never", 0.05)


def test_a_region_named_again_is_another_region(pair: Pair) -> None:
    pair.region.release()
    pair.server.allocate(128, name="kv")
    assert eventually(lambda: "kv" in pair.peer.regions and pair.peer.regions["kv"] != pair.remote)
    assert pair.peer.regions["kv"].nbytes == 128


@pytest.mark.parametrize("name", [7, None, b"kv", ("kv",)])
def test_a_region_name_of_a_wrong_type(pair: Pair, name: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="name"):
        pair.peer.regions[name]


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1:7700", "::1:7700", "127.0.0.1:x", "127.0.0.1:70000", ""])
def test_connecting_to_no_address(open_engine: OpenEngine, address: str) -> None:
    with pytest.raises(AddressError) as caught:
        open_engine(listen=None).connect(address)
    assert caught.value.hint


@pytest.mark.parametrize("address", [7700, None, b"127.0.0.1:7700", ("127.0.0.1", 7700)])
def test_an_address_of_a_wrong_type(open_engine: OpenEngine, address: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="address"):
        open_engine(listen=None).connect(address)


def test_connecting_to_a_name_that_does_not_exist(open_engine: OpenEngine) -> None:
    with pytest.raises(AddressError, match=r"no-such-host\.invalid"):
        open_engine(listen=None).connect("no-such-host.invalid:7700")


def test_connecting_to_a_closed_port(open_engine: OpenEngine) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(ConnectError) as caught:
            open_engine(listen=None).connect(address)
    assert address in str(caught.value)
    assert "refused" in caught.value.cause
    assert caught.value.retryable
    assert caught.value.hint


@pytest.mark.parametrize("host", [unaccepting_host, mute_host])
def test_connecting_to_a_host_that_does_not_answer_has_a_deadline(open_engine: OpenEngine, host: Any) -> None:
    engine = open_engine(listen=None)
    with host() as address, pytest.raises(ConnectError, match="deadline") as caught:
        engine.connect(address, timeout=0.1)
    assert address in str(caught.value)


@pytest.mark.parametrize("timeout", ["soon", [], object()])
def test_a_timeout_of_a_wrong_type(open_engine: OpenEngine, timeout: Any) -> None:
    with pytest.raises((ArgumentTypeError, InvalidArgumentError), match="timeout"):
        open_engine(listen=None).connect("127.0.0.1:1", timeout=timeout)


def test_over_ipv6(open_engine: OpenEngine) -> None:
    server, client = open_engine(listen="[::1]:0", transports="tcp"), open_engine(listen=None, transports="tcp")
    fill(server.allocate(4096, name="kv"))
    peer = client.connect(server.address or "")
    local = client.allocate(4096)
    client.read(peer, local, peer.regions["kv"]).wait()
    assert bytes(local) == pattern(4096)
    assert peer.address == server.address


def test_by_host_name(open_engine: OpenEngine) -> None:
    server, client = open_engine(), open_engine(listen=None)
    port = (server.address or "").rpartition(":")[2]
    assert client.connect(f"localhost:{port}").incarnation == server.incarnation


def test_the_same_secret_on_both_sides(open_engine: OpenEngine) -> None:
    server = open_engine(secret=b"\x00binary\xff", transports="tcp")
    client = open_engine(secret=b"\x00binary\xff", transports="tcp")
    assert client.connect(server.address or "").state is PeerState.READY


@pytest.mark.parametrize(("theirs", "ours"), [(b"a", b"b"), (b"a", None), (None, b"b")])
@pytest.mark.parametrize("transports", ["tcp", "auto"])
def test_different_secrets(open_engine: OpenEngine, theirs: bytes | None, ours: bytes | None, transports: str) -> None:
    server = open_engine("server", secret=theirs, transports=transports)
    with pytest.raises(AuthenticationError) as caught:
        open_engine(secret=ours, transports=transports).connect(server.address or "")
    assert "secret" in str(caught.value)
    assert not caught.value.retryable
    assert caught.value.hint
    # The server keeps serving.
    assert open_engine(secret=theirs, transports=transports).connect(server.address or "").name == "server"


def test_a_text_secret_is_its_utf8_bytes(open_engine: OpenEngine) -> None:
    server, client = open_engine(secret="gehéim"), open_engine(secret="gehéim".encode())
    assert client.connect(server.address or "").state is PeerState.READY


def test_nothing_in_common(open_engine: OpenEngine) -> None:
    server, client = open_engine(transports="tcp"), open_engine(transports="local")
    with pytest.raises(TransportUnavailableError) as caught:
        client.connect(server.address or "")
    assert caught.value.hint


def test_a_closed_peer(pair: Pair) -> None:
    pair.peer.close()
    pair.peer.close()
    assert pair.peer.state is PeerState.CLOSED
    for call in (
        lambda: pair.client.read(pair.peer, pair.local, pair.remote).wait(),
        pair.peer.ensure,
        lambda: pair.peer.regions.wait("never", 0.0),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_peer_closes_as_a_context_manager(pair: Pair) -> None:
    with pair.client.connect(pair.server.address or "") as peer:
        assert peer.state is PeerState.READY
    assert peer.state is PeerState.CLOSED


def test_several_peers_of_one_engine_are_independent(pair: Pair) -> None:
    other = pair.client.connect(pair.server.address or "")
    other.close()
    pair.client.read(pair.peer, pair.local, pair.remote).wait()


def test_a_peer_of_another_engine_is_refused(pair: Pair, open_engine: OpenEngine) -> None:
    stranger = open_engine(listen=None)
    with pytest.raises(InvalidArgumentError, match="another engine"):
        stranger.read(pair.peer, pair.local, pair.remote)
    with pytest.raises(InvalidArgumentError):
        pair.client.read(pair.peer, stranger.allocate(64), pair.remote, 0, 0, 64)


def test_a_region_of_another_peer_is_refused(pair: Pair, open_engine: OpenEngine) -> None:
    other = open_engine("other")
    other.allocate(1 << 16, name="kv")
    foreign = pair.client.connect(other.address or "").regions["kv"]
    with pytest.raises(RegionStaleError):
        pair.client.read(pair.peer, pair.local, foreign).wait()


def test_peers_and_handles_cannot_be_made_directly() -> None:
    with pytest.raises(TypeError, match="connect"):
        Peer()
    with pytest.raises(TypeError, match="regions"):
        RemoteRegion()


def test_a_cut_connection_comes_back_by_itself(open_pair: Any, open_engine: OpenEngine) -> None:
    server, client = open_engine("server", transports="tcp"), open_engine(transports="tcp", listen=None)
    fill(server.allocate(4096, name="kv"))
    with FaultProxy(server.address or "") as network:
        peer = client.connect(network.address)
        local, remote = client.allocate(4096), peer.regions["kv"]
        client.read(peer, local, remote).wait()
        network.cut()
        assert eventually(lambda: peer.state is not PeerState.READY)
        peer.ensure(90.0)
        assert peer.state is PeerState.READY
        # The same engine is behind it, so handles stay good.
        client.read(peer, local, remote).wait()
        assert bytes(local) == pattern(4096)
        peer.close()


def test_a_peer_that_is_gone(open_engine: OpenEngine) -> None:
    client = open_engine(transports="tcp", listen=None)
    with Target({"kv": 4096}) as target:
        peer = client.connect(target.address)
        local, remote = client.allocate(4096), peer.regions["kv"]
        target.kill()
        assert eventually(lambda: peer.state is not PeerState.READY)
        with pytest.raises((ConnectError, PeerLostError)) as caught:
            peer.ensure(0.2)
        assert isinstance(caught.value, ConnectionError)
        with pytest.raises(ConnectionError):
            client.read(peer, local, remote).wait()


def test_a_restarted_peer_is_another_incarnation(open_engine: OpenEngine) -> None:
    client = open_engine(transports="tcp", listen=None)
    with Target({"kv": 4096}) as first:
        peer = client.connect(first.address)
        old = peer.regions["kv"]
        first.kill()
    with Target({"kv": 8192}, listen=first.address):
        peer.ensure(90.0)
        assert peer.incarnation != first.incarnation
        local = client.allocate(8192)
        with pytest.raises(RegionStaleError) as caught:
            client.read(peer, local, old).wait()
        assert caught.value.hint
        new = peer.regions.wait("kv", 90.0)
        client.read(peer, local, new).wait()
        assert bytes(local) == pattern(8192)
        peer.close()


def test_the_number_of_inbound_peers_is_bounded(open_engine: OpenEngine) -> None:
    server = open_engine(peers_max=2, transports="tcp")
    clients = [open_engine(f"c{index}", listen=None, transports="tcp") for index in range(3)]
    peers = [client.connect(server.address or "") for client in clients[:2]]
    with pytest.raises(LimitError, match="peers_max") as caught:
        clients[2].connect(server.address or "")
    assert caught.value.retryable
    peers[0].close()
    assert eventually(lambda: _connects(clients[2], server.address or ""))


def _connects(engine: Any, address: str) -> bool:
    try:
        engine.connect(address)
    except LimitError:
        return False
    return True
