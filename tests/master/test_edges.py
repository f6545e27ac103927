# SPDX-License-Identifier: Apache-2.0
"""What surrounds a master misbehaves: a disk that is full, idle connections, a command line that makes no sense."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from master_testing import Member, eventually, hashes

from moonpool.errors import ConfigError
from moonpool.master import Master, MasterSettings
from moonpool.master.errors import InvalidRequestError, LimitError, StoreUnavailableError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
SECONDS = 60.0


def healthy(master: Master) -> bool:
    with urllib.request.urlopen(f"http://{master.http_address}/healthz", timeout=SECONDS) as answer:
        return bool(answer.read() == b"ok\n")


def refuse(*_: object) -> Future[None]:
    refused: Future[None] = Future()
    refused.set_exception(StoreUnavailableError("the disk is full", retryable=True))
    return refused


def test_a_removal_that_is_not_durable_is_not_said_to_be_done(
    start_master: Start, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    join(master, pb.NODE).mount(1 << 20)
    client, other = join(master), join(master)
    chunks = hashes(4)
    assert client.put(chunks) == bytes(4)
    core = master.server.core
    with monkeypatch.context() as patch:
        patch.setattr(core.store, "apply", refuse)
        with pytest.raises(StoreUnavailableError, match="4 chunks is not durable yet"):
            client.remove(chunks)
        assert client.exists(chunks) == bytes([pb.NOT_FOUND] * 4)
        with pytest.raises(StoreUnavailableError, match="4 chunks"):
            other.remove(chunks)
        assert core.waiting_for_store == 4
    assert other.remove(chunks) == bytes([pb.NOT_FOUND] * 4)
    assert core.waiting_for_store == 0
    master.close()
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    assert master.server.core.restored_chunks == 0


def test_a_removal_that_the_store_did_not_take_is_taken_when_the_master_ends(
    start_master: Start, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    join(master, pb.NODE).mount(1 << 20)
    client = join(master)
    chunks = hashes(4)
    client.put(chunks)
    core, close = master.server.core, master.server.core.supervisor.close
    monkeypatch.setattr(core.store, "apply", refuse)
    with pytest.raises(StoreUnavailableError):
        client.remove(chunks)

    async def close_and_mend() -> None:
        await close()
        monkeypatch.undo()

    monkeypatch.setattr(core.supervisor, "close", close_and_mend)
    client.vanish()
    master.close()
    assert start_master(store=f"sqlite:{tmp_path / 'master.db'}").server.core.restored_chunks == 0


def test_idle_connections_do_not_keep_others_from_the_status_pages(
    start_master: Start, caplog: pytest.LogCaptureFixture
) -> None:
    master = start_master()
    host, _, port = master.http_address.rpartition(":")
    with ExitStack() as idle:
        first = idle.enter_context(socket.create_connection((host, int(port)), timeout=SECONDS))
        for _ in range(150):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=SECONDS))
        assert all(healthy(master) for _ in range(10))
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b"", "the oldest one was closed"
        master.close()
    assert not caplog.records


def test_memory_of_another_size_is_another_segment(start_master: Start, join: Join) -> None:
    node = join(start_master(), pb.NODE)
    segment = node.mount(1 << 20)
    assert node.mount(1 << 20) == segment, "the reply was lost"
    with pytest.raises(InvalidRequestError, match="same memory"):
        node.mount(1 << 21)


class NoMemory:
    """An index that has no memory for one more segment."""

    def __init__(self, index: Any) -> None:
        self._index = index

    def add_segment(self, *_: object, **__: object) -> None:
        raise MemoryError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


def test_a_mount_that_the_index_refuses_leaves_nothing(
    start_master: Start, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master()
    node, client = join(master, pb.NODE), join(master)
    for capacity in (0, 1, 63):
        with pytest.raises(InvalidRequestError, match=f"a capacity of {capacity} bytes"):
            node.mount(capacity)
    core = master.server.core
    with monkeypatch.context() as patch:
        patch.setattr(core.segments, "_index", NoMemory(core.index))
        with pytest.raises(LimitError):
            node.mount(1 << 20)
    assert client.segments() == {}
    assert client.status()["segments"] == []
    number = node.mount(1 << 20)
    assert client.segments()[number].state == pb.ACTIVE


def test_a_mount_that_waits_for_the_store_is_not_one_that_did_not_come_back(
    start_master: Start, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = start_master(segment_grace=0.1, quarantine=0.04)
    node, client = join(master, pb.NODE), join(master)
    core = master.server.core
    kept: Future[None] = Future()
    with monkeypatch.context() as patch:
        patch.setattr(core.store, "put_segment", lambda _: kept)
        mounting = threading.Thread(target=node.mount, args=(1 << 20,))
        mounting.start()
        eventually(lambda: core.segments.all, "a mount")
    loop = core.supervisor.loops["segments"]
    rounds = loop.rounds
    eventually(lambda: loop.rounds > rounds + 20, "rounds beyond the grace")
    kept.set_result(None)
    mounting.join()
    assert [segment.state for segment in client.segments().values()] == [pb.ACTIVE]


def test_a_path_that_no_file_can_have_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="store is"):
        Master(listen="127.0.0.1:0", http=None, store="sqlite:a\0b")


def run(*arguments: str) -> Any:
    command = [sys.executable, "-m", "moonpool.cli", "master", "--store", "memory", "--listen", "127.0.0.1:0"]
    return subprocess.run(
        [*command, "--http", "none", *arguments], check=False, capture_output=True, text=True, timeout=SECONDS
    )


def test_a_command_line_that_cannot_work_is_an_error_without_a_traceback() -> None:
    for arguments in (("--ready-fd", "77"), ("--ready-fd", "-1")):
        done = run(*arguments)
        assert done.returncode == 2
        assert "is no open descriptor" in done.stderr
        assert "Traceback" not in done.stderr
    done = run("--secret", "@/nowhere")
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_store_that_is_no_store_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    path.write_bytes(os.urandom(10_000))
    done = run("--store", f"sqlite:{path}")
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(path) in done.stderr


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"hunter2\n")
    environ = {"MOONPOOL_MASTER_SECRET": f"@{tmp_path / 'secret'}"}
    assert MasterSettings.load({}, environ=environ).secret == b"hunter2"
    assert MasterSettings.load({"secret": f"@{tmp_path / 'secret'}"}, environ={}).secret == b"hunter2"
    assert MasterSettings.load({"secret": b"@literal"}, environ={}).secret == b"@literal"
