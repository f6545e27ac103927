# SPDX-License-Identifier: Apache-2.0
"""`moonpool.transfer_engine.testing.FaultProxy`: what each command and rule does to an engine behind it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.leaks import eventually
from engine_testing.patterns import fill, pattern

from moonpool.address import parse_address
from moonpool.transfer_engine import (
    AddressError,
    ClosedError,
    ConnectError,
    DeadlineError,
    DigestMismatchError,
    InvalidArgumentError,
    Peer,
    PeerState,
    Region,
    RemoteRegion,
    TransferEngine,
    TransferState,
)
from moonpool.transfer_engine.testing import Corrupt, Cut, Delay, FaultProxy, Refuse, Reorder, Rule

NBYTES = 4 << 20
LANES = 2


@dataclass
class Behind:
    """A client connected to a server through a proxy."""

    network: FaultProxy
    client: TransferEngine
    server: TransferEngine
    peer: Peer
    local: Region
    region: Region
    remote: RemoteRegion

    def read(self, nbytes: int = NBYTES) -> None:
        """Read, and check what came."""
        memoryview(self.local)[:nbytes] = bytes(nbytes)
        self.client.read(self.peer, self.local, self.remote, 0, 0, nbytes).wait()
        assert bytes(memoryview(self.local)[:nbytes]) == pattern(NBYTES)[:nbytes]


@pytest.fixture(params=[LANES])
def behind(open_engine: OpenEngine, request: pytest.FixtureRequest) -> Iterator[Behind]:
    server = open_engine("server", transports="tcp")
    client = open_engine("client", transports="tcp", listen=None, lanes=request.param)
    region = server.allocate(NBYTES, name="kv")
    fill(region)
    with FaultProxy(server.address or "", seed=3) as network:
        peer = client.connect(network.address)
        yield Behind(network, client, server, peer, client.allocate(NBYTES), region, peer.regions["kv"])
        client.close()


def test_without_faults_it_only_passes_on_and_counts(behind: Behind) -> None:
    behind.read()
    network = behind.network
    assert eventually(lambda: network.connections("lane") == LANES)
    assert network.connections("control") == 1
    assert network.connections() == len(network.connection_bytes) == 1 + LANES
    assert network.taken_bytes >= network.forwarded_bytes == sum(network.connection_bytes) > NBYTES
    assert network.connections_cut == 0
    assert repr(network) == f"<FaultProxy {network.address} to {behind.server.address}, {1 + LANES} connections>"


@pytest.mark.parametrize("reset", [True, False])
def test_lanes_that_are_cut_are_made_again(behind: Behind, reset: bool) -> None:
    behind.read()
    assert eventually(lambda: behind.network.connections("lane") == LANES)
    assert behind.network.cut(reset=reset, only="lane", count=1) == 1
    assert behind.network.cut(reset=reset, only="lane") >= LANES - 1
    behind.read()
    assert behind.peer.state is PeerState.READY
    assert behind.network.connections("control") == 1


def test_a_cut_control_connection_is_made_again(behind: Behind) -> None:
    assert behind.network.cut() >= 1
    assert eventually(lambda: behind.peer.state is not PeerState.READY)
    behind.peer.ensure(90.0)
    behind.read()


@pytest.mark.parametrize("reset", [True, False])
def test_a_rule_cuts_in_the_middle_of_a_transfer(behind: Behind, reset: bool) -> None:
    behind.read()
    behind.network.apply(Cut(only="lane", after_bytes=(1 << 16, 1 << 18), reset=reset, times=1))
    # It concerns one lane, and another one may carry a transfer.
    while behind.network.connections_cut == 0:
        behind.read()
    assert behind.client.stats()["lane_errors"] >= 1
    assert behind.network.connections("control") == 1


@pytest.mark.parametrize("behind", [1], indirect=True)
@pytest.mark.parametrize("direction", ["to_target", "from_target"])
def test_a_flipped_bit_is_found_by_the_digest_and_by_nothing_else(behind: Behind, direction: str) -> None:
    engine, peer, local, remote = behind.client, behind.peer, behind.local, behind.remote
    behind.read()
    fill(local, seed=1)
    move, source, sink = (
        (engine.write, pattern(NBYTES, 1), behind.region)
        if direction == "to_target"
        else (engine.read, pattern(NBYTES), local)
    )

    def spoil() -> None:
        # Far behind the request's own header, and far from the end.
        behind.network.apply(Corrupt(only="lane", after_bytes=1 << 17, direction=direction, times=1))  # type: ignore[arg-type]

    spoil()
    with pytest.raises(DigestMismatchError):
        move(peer, local, remote, digest=True).wait()
    behind.network.clear()
    spoil()
    move(peer, local, remote).wait()
    wrong = [(a, b) for a, b in zip(bytes(sink), source, strict=True) if a != b]
    assert [(a ^ b).bit_count() for a, b in wrong] == [1]
    behind.network.clear()
    move(peer, local, remote, digest=True).wait()


def test_stalled_lanes_leave_the_control_connection_alone(behind: Behind) -> None:
    behind.read()
    assert eventually(lambda: behind.network.connections("lane") == LANES)
    behind.network.stall(only="lane")
    transfer = behind.client.read(behind.peer, behind.local, behind.remote)
    behind.server.allocate(64, name="new")
    assert behind.peer.regions.wait("new", 90.0).nbytes == 64
    assert transfer.state is TransferState.RUNNING
    behind.network.resume()
    transfer.wait()


def test_one_stalled_lane_is_given_up_and_its_work_goes_over_another(open_engine: OpenEngine) -> None:
    server = open_engine("server", transports="tcp")
    fill(server.allocate(NBYTES, name="kv"))
    client = open_engine("client", transports="tcp", listen=None, lanes=LANES, progress_timeout=0.3)
    with FaultProxy(server.address or "") as network:
        peer, local = client.connect(network.address), client.allocate(NBYTES)
        client.read(peer, local, peer.regions["kv"]).wait()
        assert eventually(lambda: network.connections("lane") == LANES)
        network.stall(only="lane", count=1)
        memoryview(local)[:] = bytes(NBYTES)
        client.read(peer, local, peer.regions["kv"]).wait()
        assert bytes(local) == pattern(NBYTES)
        client.close()


def test_a_stall_after_so_many_bytes_is_announced(behind: Behind) -> None:
    behind.network.stall(after_bytes=1 << 20)
    transfer = behind.client.read(behind.peer, behind.local, behind.remote)
    assert behind.network.stalled.wait(90.0)
    assert transfer.state is TransferState.RUNNING
    behind.network.resume()
    assert not behind.network.stalled.is_set()
    transfer.wait()


def test_a_write_whose_answer_comes_after_its_deadline_is_known_to_be_in_place(behind: Behind) -> None:
    behind.read()
    behind.network.stall()
    fill(behind.local, seed=1)
    transfer = behind.client.write(behind.peer, behind.local, behind.remote, 0, 0, 64, deadline=0.1)
    with pytest.raises(DeadlineError):
        transfer.wait()
    assert transfer.state is TransferState.UNSETTLED
    behind.network.resume()
    assert transfer.cancel() is TransferState.COMPLETED
    assert transfer.error is None
    assert transfer.wait().statuses == bytes(1)
    assert bytes(behind.region)[:64] == pattern(NBYTES, 1)[:64]


def test_delayed_lanes_still_bring_the_right_bytes(behind: Behind) -> None:
    behind.network.apply(Delay(only="lane", seconds=(0.0, 0.002)))
    behind.read()
    behind.network.clear()
    behind.read()


def test_refused_lanes_are_tried_again(behind: Behind) -> None:
    behind.network.apply(Refuse(only="lane"))
    transfer = behind.client.read(behind.peer, behind.local, behind.remote)
    assert eventually(lambda: behind.network.connections_cut >= 2)
    assert not transfer.done()
    behind.network.clear()
    transfer.wait()


def test_reordered_connections_all_come(open_engine: OpenEngine) -> None:
    server = open_engine("server", transports="tcp")
    with FaultProxy(server.address or "", seed=1) as network:
        network.apply(Reorder(hold=8, seconds=0.2))
        clients = [open_engine(f"{index}", transports="tcp", listen=None, lanes=1) for index in range(8)]
        with ThreadPoolExecutor(len(clients)) as pool:
            peers = list(pool.map(lambda client: client.connect(network.address), clients))
        assert len(peers) == server.stats()["serving"]["sessions"] == len(clients)
        for client in clients:
            client.close()


def test_the_order_of_reordered_connections_is_the_seeds() -> None:
    def order(seed: int) -> list[bytes]:
        with socket.create_server(("127.0.0.1", 0)) as target:
            target.settimeout(90.0)
            with (
                FaultProxy("{}:{}".format(*target.getsockname()), seed=seed) as network,
                contextlib.ExitStack() as stack,
            ):
                network.apply(Reorder(hold=6, seconds=0.5))
                where = parse_address(network.address)
                for index in range(6):
                    client = stack.enter_context(socket.create_connection((where.host, where.port)))
                    client.sendall(bytes([index]))
                served = [stack.enter_context(target.accept()[0]) for _ in range(6)]
                return [sock.recv(1) for sock in served]

    first = order(1)
    assert sorted(first) == [bytes([index]) for index in range(6)] != first
    assert order(1) == first
    assert order(2) != first


def test_a_restarted_target_is_found_at_its_new_address(behind: Behind, open_engine: OpenEngine) -> None:
    behind.read()
    again = open_engine("again", transports="tcp")
    fill(again.allocate(64, name="kv"), seed=2)
    behind.network.retarget(again.address or "")
    behind.server.close()
    assert eventually(lambda: behind.peer.state is not PeerState.READY)
    behind.peer.ensure(90.0)
    assert behind.peer.incarnation == again.incarnation
    behind.client.read(behind.peer, behind.local, behind.peer.regions["kv"]).wait()
    assert bytes(behind.local)[:64] == pattern(64, seed=2)


def test_other_protocols_pass_and_are_of_no_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(90.0)
        with FaultProxy("{}:{}".format(*target.getsockname())) as network:
            network.apply(Refuse(only="lane"), Refuse(only="control"))
            where = parse_address(network.address)
            with socket.create_connection((where.host, where.port), 90.0) as client:
                served, _ = target.accept()
                with served:
                    served.settimeout(90.0)
                    client.sendall(b"GET /")
                    assert served.recv(16) == b"GET /"
                    assert (network.connections(), network.connections("lane")) == (1, 0)
                    # Each direction ends by itself, as with a cable.
                    client.shutdown(socket.SHUT_WR)
                    assert served.recv(16) == b""
                    served.sendall(b"late")
                    assert client.recv(16) == b"late"


def test_a_target_that_is_not_there_resets(open_engine: OpenEngine) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        client = open_engine(listen=None, transports="tcp")
        with FaultProxy("{}:{}".format(*nobody.getsockname())) as network, pytest.raises(ConnectError):
            client.connect(network.address)


def test_a_closed_proxy_says_so() -> None:
    network = FaultProxy("127.0.0.1:1")
    network.close()
    network.close()
    assert repr(network).endswith("closed>")
    for use in (network.stall, network.cut, network.clear, network.connections):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("target", ["localhost", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_targets_that_are_no_addresses(target: str) -> None:
    with pytest.raises(AddressError):
        FaultProxy(target)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Cut(after_bytes=-1),
        lambda: Cut(after_bytes=(2, 1)),
        lambda: Cut(after_bytes=(1, 2, 3)),  # type: ignore[arg-type]
        lambda: Cut(after_bytes=0.5),  # type: ignore[arg-type]
        lambda: Cut(after_bytes="x"),  # type: ignore[arg-type]
        lambda: Cut(after_bytes=1 << 100_000),
        lambda: Delay(seconds=-0.1),
        lambda: Delay(seconds=float("inf")),
        lambda: Delay(seconds=float("nan")),
        lambda: Delay(seconds=None),  # type: ignore[arg-type]
        lambda: Corrupt(after_bytes=0, direction="sideways"),  # type: ignore[arg-type]
        lambda: Refuse(only="lanes"),  # type: ignore[arg-type]
        lambda: Refuse(probability=1.5),
        lambda: Refuse(only=["lane"]),  # type: ignore[arg-type]
        lambda: Refuse(probability="often"),  # type: ignore[arg-type]
        lambda: Refuse(times=0),
        lambda: Refuse(times=1.5),  # type: ignore[arg-type]
        lambda: Reorder(hold=1),
        lambda: Reorder(hold="all"),  # type: ignore[arg-type]
        lambda: Reorder(only="lane"),
    ],
)
def test_rules_are_strict(wrong: Callable[[], Rule]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        wrong()
    assert caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        lambda network: network.stall(only="lanes"),
        lambda network: network.stall(count=-1),
        lambda network: network.stall(-1),
        lambda network: network.stall(0.5),
        lambda network: network.cut(only="lanes"),
        lambda network: network.cut(count=-1),
        lambda network: network.cut(count="two"),
        lambda network: network.connections("lanes"),
        lambda network: network.retarget(5),
        lambda network: network.apply("cut"),
        lambda network: FaultProxy(5),  # type: ignore[arg-type]
        lambda network: FaultProxy(None),  # type: ignore[arg-type]
        lambda network: FaultProxy(network.address, seed="x"),  # type: ignore[arg-type]
    ],
)
def test_commands_are_strict(wrong: Callable[[FaultProxy], object]) -> None:
    with FaultProxy("127.0.0.1:1") as network:
        with pytest.raises(InvalidArgumentError) as caught:
            wrong(network)
        assert caught.value.hint
