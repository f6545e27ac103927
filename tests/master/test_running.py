# SPDX-License-Identifier: Apache-2.0
"""Running a master: secret, garbage on the port, status pages, loops that fail, events, the command."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from master_testing import Member, call, eventually, hashes, stub

from moonpool.errors import ConfigError
from moonpool.master import ListenError, Master, MasterSettings
from moonpool.master.errors import AuthenticationError, InvalidRequestError, StoreUnavailableError
from moonpool.proto import pool_pb2 as pb
from moonpool.proto.errors import from_rpc_error

Start = Callable[..., Master]
Join = Callable[..., Member]
MIB = 1 << 20
SECONDS = 60.0


def get(master: Master, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{master.http_address}{page}", timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# ---------------------------------------------------------------- secret


@pytest.mark.parametrize("secret", [None, b"wrong", b"right "])
def test_without_the_secret_every_call_is_refused(start_master: Start, secret: bytes | None) -> None:
    master = start_master(secret=b"right")
    channel, pool = stub(master.address, secret)
    requests: dict[str, Any] = {
        rpc.name: getattr(pb, rpc.input_type.name)() for rpc in pb.DESCRIPTOR.services_by_name["Pool"].methods
    }
    with channel:
        for name, request in requests.items():
            with pytest.raises(AuthenticationError) as caught:
                ask(getattr(pool, name), name, request)
            assert "secret" in str(caught.value)


def ask(method: Any, name: str, request: Any) -> None:
    """Make a call, of whichever kind, and raise what the master raised."""
    try:
        if name == "Heartbeat":
            list(method(iter([request]), timeout=SECONDS))
        elif name == "WatchEvents":
            list(method(request, timeout=SECONDS))
        else:
            method(request, timeout=SECONDS)
    except grpc.RpcError as error:
        raise from_rpc_error(error, "the call failed", "here") from error


def test_with_the_secret_everything_works(start_master: Start, join: Join) -> None:
    master = start_master(secret=b"right")
    join(master, pb.NODE, host="node-0", secret=b"right").mount(MIB)
    client = join(master, secret=b"right")
    assert client.put(hashes(3)) == bytes(3)


def test_with_asyncio_too(start_master: Start) -> None:
    from moonpool.proto import pool_pb2_grpc
    from moonpool.proto.auth import aio_channel

    master = start_master(secret=b"right")

    async def ask(secret: bytes) -> None:
        async with aio_channel(master.address, secret) as channel:
            await channel.channel_ready()
            pool = pool_pb2_grpc.PoolStub(channel)
            for _ in range(3):
                assert (await pool.Exists(pb.ExistsRequest(hashes=bytes(64)), timeout=SECONDS)).statuses == b"\2\2"
            beats = pool.Heartbeat(hello(), timeout=SECONDS)
            assert (await beats.read()).WhichOneof("kind") == "welcome"
            beats.cancel()

    async def hello() -> AsyncIterator[pb.HeartbeatRequest]:
        yield pb.HeartbeatRequest(hello=pb.Hello(session=os.urandom(16), incarnation=os.urandom(16)))

    asyncio.run(ask(b"right"))
    with pytest.raises(grpc.RpcError):
        asyncio.run(ask(b"wrong"))


def test_a_proof_is_good_for_one_call(start_master: Start) -> None:
    from moonpool.proto.auth import Signer

    master = start_master(secret=b"right")
    channel, pool = stub(master.address)
    proof = Signer(b"right").sign("/moonpool.v1.Pool/Exists")
    with channel:
        pool.Exists(pb.ExistsRequest(), metadata=[proof], timeout=SECONDS)
        for method in (pool.Exists, pool.Locate):
            with pytest.raises(grpc.RpcError) as caught:
                method(pb.ExistsRequest(), metadata=[proof], timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_beyond_loopback_a_secret_is_needed() -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "10.0.0.1:7600", "some-host:7600"):
        with pytest.raises(ConfigError, match="secret"):
            MasterSettings.load({"listen": listen}, environ={})
        MasterSettings.load({"listen": listen, "insecure": True}, environ={})
        MasterSettings.load({"listen": listen, "secret": "x"}, environ={})
    for listen in ("127.0.0.1:0", "127.8.0.1:0", "[::1]:0", "localhost:0"):
        MasterSettings.load({"listen": listen}, environ={})


@pytest.mark.parametrize(
    "options",
    [
        {"low_watermark": 0.9, "high_watermark": 0.8},
        {"heartbeat_interval": 20.0},
        {"put_begin": "1min"},
        {"secret": ""},
        {"policy": "fifo"},
        {"chunks_max": 0},
    ],
)
def test_values_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MasterSettings.load(options, environ={})


# ---------------------------------------------------------------- garbage


def test_garbage_on_the_port_harms_nobody(start_master: Start, join: Join) -> None:
    """M8: the master dies of nothing that comes over the network."""
    master = start_master()
    join(master, pb.NODE, host="node-0").mount(MIB)
    client = join(master)
    chance = random.Random(5)
    host, _, port = master.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for start in (
        b"",
        preface,
        preface + bytes.fromhex("000000040000000000"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01",
    ):
        for _ in range(8):
            with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
                connection.sendall(start + chance.randbytes(chance.randrange(2000)))
    channel = grpc.insecure_channel(master.address)
    with channel:
        for rpc in pb.DESCRIPTOR.services_by_name["Pool"].methods:
            path = f"/moonpool.v1.Pool/{rpc.name}"
            for _ in range(5):
                data = chance.randbytes(chance.randrange(1, 300))
                assert send(channel, rpc, path, data) in {None, "INVALID_REQUEST", "SESSION_UNKNOWN"}
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/moonpool.v1.Pool/NoSuchCall")(b"", timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert client.put(hashes(3)) == bytes(3)
    assert client.status()["healthy"]


def send(channel: grpc.Channel, rpc: Any, path: str, data: bytes) -> str | None:
    """Send bytes as a request and return the code of the error; None: they happened to be a request."""
    try:
        if rpc.client_streaming:
            list(channel.stream_stream(path)(iter([data]), timeout=SECONDS))
        elif rpc.server_streaming:
            next(channel.unary_stream(path)(data, timeout=SECONDS))
        else:
            channel.unary_unary(path)(data, timeout=SECONDS)
    except grpc.RpcError as error:
        return from_rpc_error(error, "garbage", "here").code
    return None


def test_a_message_that_is_too_large_is_refused(start_master: Start, join: Join) -> None:
    client = join(start_master(batch_max=100))
    with pytest.raises(grpc.RpcError) as caught:
        client.pool.Exists(pb.ExistsRequest(hashes=bytes(32 * 100_000)), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(InvalidRequestError, match="at most 100"):
        client.exists(bytes(32 * 101))


# ---------------------------------------------------------------- status pages


def test_status_pages(start_master: Start, join: Join) -> None:
    master = start_master()
    join(master, pb.NODE, host="node-0").mount(MIB)
    client = join(master)
    chunks = hashes(4)
    client.put(chunks)
    client.locate(chunks + hashes(4))
    assert get(master, "/healthz") == (200, "ok\n")
    code, text = get(master, "/status")
    status = json.loads(text)
    assert code == 200
    assert status["index"]["chunks"] == 4
    assert status["hit_rate"] == 0.5
    assert [segment["node"] for segment in status["segments"]] == ["node-0"]
    code, text = get(master, "/metrics")
    assert code == 200
    metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert metrics["moonpool_master_chunks"] == "4"
    assert metrics["moonpool_master_lookup_hits_items_total"] == "4"
    assert metrics['moonpool_master_call_seconds_count{method="PutStart"}'] == "1"
    assert metrics['moonpool_master_loop_alive{loop="evict"}'] == "1"
    assert float(metrics["moonpool_master_index_memory_bytes"]) > 0
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert get(master, "/")[0] == 404
    host, _, port = master.http_address.rpartition(":")
    for garbage in (b"", b"\r\n\r\n", b"POST /status HTTP/1.1\r\n\r\n", b"x" * 100_000, bytes(range(256)) * 4):
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(garbage)
    assert get(master, "/healthz")[0] == 200


def test_a_loop_that_fails_goes_on_and_one_that_stays_dead_is_seen(start_master: Start) -> None:
    """M13: the eviction thread died of an exception and nobody noticed."""
    master = start_master()
    loop = master.server.core.supervisor.loops["evict"]
    works, loop._work = loop._work, broken
    eventually(lambda: loop.failures, "a failure")
    eventually(lambda: get(master, "/healthz")[0] == 503, "it shows")
    assert "evict" in get(master, "/healthz")[1]
    assert 'loop_alive{loop="evict"} 0' in get(master, "/metrics")[1]
    loop._work = works
    rounds = loop.rounds
    eventually(lambda: loop.rounds > rounds, "it goes on")
    assert get(master, "/healthz") == (200, "ok\n")


def broken() -> None:
    raise RuntimeError("on purpose")


def test_a_loop_that_ends_is_started_again(start_master: Start) -> None:
    master = start_master()
    supervisor = master.server.core.supervisor
    (task,) = [one for one in supervisor._tasks if one.get_name() == "moonpool-evict"]
    task.get_loop().call_soon_threadsafe(task.cancel)
    eventually(lambda: supervisor.restarts == 1, "another one")
    rounds = supervisor.loops["evict"].rounds
    eventually(lambda: supervisor.loops["evict"].rounds > rounds, "it works")


# ---------------------------------------------------------------- a store that fails


def test_a_full_store_refuses_commits_and_gives_nothing_away(start_master: Start, join: Join, tmp_path: Path) -> None:
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    join(master, pb.NODE, host="node-0").mount(64 * MIB)
    client = join(master)
    before = hashes(100)
    assert client.put(before) == bytes(100)
    database = master.server.core.store._connection  # type: ignore[attr-defined]
    run = master.server.core.store._writing.read  # type: ignore[attr-defined]
    assert database is not None
    pages = run("PRAGMA page_count", ()).result(SECONDS)[0][0]
    run(f"PRAGMA max_page_count = {pages}", ()).result(SECONDS)
    given = client.start(hashes(5000))
    with pytest.raises(StoreUnavailableError) as caught:
        client.commit(given)
    assert caught.value.retryable
    assert client.exists(given.hashes) == bytes([pb.NOT_FOUND] * 5000)
    assert client.exists(before) == bytes(100)
    run("PRAGMA max_page_count = 1000000", ()).result(SECONDS)
    assert client.put(given.hashes) == bytes(5000)


def test_a_commit_whose_caller_went_away_is_done_or_not_and_never_half(
    start_master: Start, join: Join, tmp_path: Path
) -> None:
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    join(master, pb.NODE, host="node-0").mount(64 * MIB)
    client = join(master)
    for turn in range(60):
        given = client.start(hashes(20))
        request = pb.PutCommitRequest(
            session=client.id, namespace="ns", hashes=given.hashes, generations=given.generations
        )
        commit = client.pool.PutCommit.future(request, timeout=SECONDS)
        if turn % 3:
            threading.Event().wait(turn / 30_000)
        commit.cancel()
        # Whatever became of it, what is not committed can be given up, and then be put again.
        eventually(
            lambda given=given: (
                client.abort(given, settled=True) and set(client.put(given.hashes)) <= {pb.OK, pb.ALREADY}
            ),
            "the chunks are there",
        )
        assert client.exists(given.hashes) == bytes(20)
    index = client.status()["index"]
    assert (index["chunks"], index["writing"]) == (1200, 0)


# ---------------------------------------------------------------- events


def test_events_are_told_from_a_cursor_on(start_master: Start, join: Join) -> None:
    master = start_master()
    node = join(master, pb.NODE, host="node-0")
    client = join(master)
    boot = client.header.boot_id
    told: queue.SimpleQueue[pb.Event] = queue.SimpleQueue()
    watching = client.pool.WatchEvents(pb.WatchEventsRequest(boot_id=boot, cursor=0))

    def watch() -> None:
        try:
            for event in watching:
                told.put(event)
        except grpc.RpcError:
            return

    watcher = threading.Thread(target=watch)
    watcher.start()
    chunks = hashes(3)
    segment = node.mount(MIB)
    client.put(chunks)
    client.remove(chunks[32:64])
    call(client.pool.Drain, pb.DrainRequest(segment=segment))
    events = [told.get(timeout=SECONDS) for _ in range(4)]
    assert [event.cursor for event in events] == [1, 2, 3, 4]
    assert [event.kind for event in events] == [
        pb.Event.SEGMENT,
        pb.Event.COMMITTED,
        pb.Event.REMOVED,
        pb.Event.SEGMENT,
    ]
    assert (events[1].namespace, events[1].hashes) == ("ns", chunks)
    assert events[2].hashes == chunks[32:64]
    assert (events[3].segment, events[3].state) == (segment, pb.DRAINING)
    watching.cancel()
    watcher.join()
    # From the middle, and from somewhere that is no place of this master.
    again = client.pool.WatchEvents(pb.WatchEventsRequest(boot_id=boot, cursor=2))
    assert next(again).cursor == 3
    again.cancel()
    for lost in (
        pb.WatchEventsRequest(boot_id=boot, cursor=99),
        pb.WatchEventsRequest(boot_id=os.urandom(16), cursor=1),
    ):
        stream = client.pool.WatchEvents(lost)
        assert next(stream).kind == pb.Event.LOST_EVENTS
        stream.cancel()


def test_a_watcher_that_was_away_for_too_long_is_told_so(start_master: Start, join: Join) -> None:
    master = start_master(events_max=16)
    join(master, pb.NODE, host="node-0").mount(MIB)
    client = join(master)
    for _ in range(30):
        client.put(hashes(1), 100)
    stream = client.pool.WatchEvents(pb.WatchEventsRequest(boot_id=client.header.boot_id, cursor=3))
    assert next(stream).kind == pb.Event.LOST_EVENTS
    client.put(hashes(1), 100)
    assert next(stream).kind == pb.Event.COMMITTED
    stream.cancel()


# ---------------------------------------------------------------- starting and stopping


def test_an_address_that_is_taken_is_an_error(start_master: Start) -> None:
    master = start_master()
    with pytest.raises(ListenError, match="could not listen"):
        Master(listen=master.address, http=None, store="memory")
    with pytest.raises(ListenError, match="status pages"):
        Master(listen="127.0.0.1:0", http=master.http_address, store="memory")


def test_closing_ends_streams_threads_and_waiting_puts(start_master: Start, join: Join) -> None:
    before = {thread.name for thread in threading.enumerate()}
    master = start_master(put_begin=20.0)
    node = join(master, pb.NODE, host="node-0")
    segment = node.mount(MIB)
    client = join(master)
    waiting = client.pool.PutStart.future(
        pb.PutStartRequest(
            session=client.id,
            namespace="ns",
            hashes=hashes(1),
            lengths=(1000).to_bytes(8, "little"),
            avoid=[segment],
            wait_ms=10_000,
        ),
        timeout=SECONDS,
    )
    eventually(lambda: client.status()["counts"]["put_waits_calls"] == 1, "a put that waits")
    master.close()
    master.close()
    eventually(lambda: client.ended and node.ended, "the end of the streams")
    assert waiting.result().statuses == bytes([pb.NO_SPACE])
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("moonpool")} - before


def test_the_command_explains_itself() -> None:
    for arguments in (["--help"], ["master", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "moonpool.cli", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        assert "moonpool master --store sqlite:" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "moonpool.cli", "master", "--listen", "0.0.0.0:0", "--store", "memory"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert wrong.returncode == 3
    assert "insecure=true" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text('[master]\nlease_max = "3s"\nstore = "memory"\n', encoding="utf-8")
    settings = MasterSettings.load({"cluster": "here"}, file=file, environ={"MOONPOOL_MASTER_CHUNKS_MAX": "5"})
    assert (settings.lease_max, settings.store, settings.cluster, settings.chunks_max) == (3.0, "memory", "here", 5)
    file.write_text('[master]\nlease = "3s"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="lease"):
        MasterSettings.load({}, file=file, environ={})
