# SPDX-License-Identifier: Apache-2.0
"""What the disk does under a master that runs: files that go or shrink, and rows that it does not take."""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from master_testing import Member, eventually, hashes

from moonpool.master import Master
from moonpool.master.errors import StoreLostError, StoreUnavailableError
from moonpool.proto import pool_pb2 as pb

Start = Callable[..., Master]
Join = Callable[..., Member]
SECONDS = 60.0


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.rename(path)


def health(master: Master) -> str:
    try:
        with urllib.request.urlopen(f"http://{master.http_address}/healthz", timeout=SECONDS) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


@pytest.mark.parametrize("which", ["master.db", "master.db-wal"])
@pytest.mark.parametrize("checkpoints", [0, 3])
@pytest.mark.parametrize("harm", [delete, empty, replace])
def test_files_that_are_gone_make_nothing_durable(
    start_master: Start, join: Join, tmp_path: Path, which: str, checkpoints: int, harm: Callable[[Path], None]
) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "real" / "master.db")
    master = start_master(store=f"sqlite:{link}")
    join(master, pb.NODE).mount(1 << 20)
    client, chunks, more = join(master), hashes(4), hashes(4)
    assert client.put(chunks) == bytes(4)
    given = client.start(more)
    store = master.server.core.store
    for _ in range(checkpoints):  # a log that is written anew from its beginning is no harm
        store._writing.read("PRAGMA wal_checkpoint", ()).result(SECONDS)  # type: ignore[attr-defined]
        assert client.put(hashes(100)) == bytes(100)
    assert health(master) == "ok\n"
    harm(tmp_path / "real" / which)
    with pytest.raises(StoreLostError, match=r"link\.db") as caught:
        client.commit(given)
    assert not caught.value.retryable
    assert which in (caught.value.cause or "").replace("link", "master")
    assert client.exists(chunks + more) == bytes(4) + bytes([pb.NOT_FOUND] * 4)
    with pytest.raises(StoreLostError):
        client.put(hashes(1))
    assert client.locate(chunks).statuses == bytes(4)
    for _ in range(2):
        with pytest.raises(StoreLostError):
            client.remove(chunks[:32])
    assert health(master).startswith("STORE_LOST: ")


def test_files_that_are_gone_are_noticed_also_when_nobody_writes(
    start_master: Start, join: Join, tmp_path: Path
) -> None:
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    client = join(master)
    (tmp_path / "master.db").unlink()
    eventually(lambda: "STORE_LOST" in health(master), "that it is noticed")
    assert not client.status()["healthy"]


def test_who_only_reads_needs_no_disk(
    start_master: Start, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StoreUnavailableError("the disk is full", retryable=True))
        return failed

    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    join(master, pb.NODE).mount(1 << 20)
    chunks = hashes(4)
    assert join(master).put(chunks) == bytes(4)
    with monkeypatch.context() as patch:
        patch.setattr(master.server.core.store, "put_writer", refuse)
        reader = join(master)
        assert reader.locate(chunks, lease_ms=100).statuses == bytes(4)
        for write in (lambda: reader.put(hashes(1)), lambda: reader.pin(chunks)):
            with pytest.raises(StoreUnavailableError, match="the disk is full"):
                write()
        held = (pb.HeldPin(pin=7, namespace="ns", hashes=chunks),)
        with pytest.raises(StoreUnavailableError):  # a later master has to know of it
            join(master, pins=held)
    assert reader.put(hashes(1)) == bytes(1)
    assert reader.pin(chunks).pin


def test_a_row_is_there_before_anything_is_given(start_master: Start, join: Join, tmp_path: Path) -> None:
    master = start_master(store=f"sqlite:{tmp_path / 'master.db'}")
    join(master, pb.NODE).mount(1 << 20)
    writer, pinner, reader = (join(master) for _ in range(3))
    chunks = hashes(2)
    assert writer.put(chunks) == bytes(2)
    assert pinner.pin(chunks).pin
    assert reader.locate(chunks).statuses == bytes(2)
    store = master.server.core.store
    rows = store._writing.read("SELECT session FROM writers", ()).result(SECONDS)  # type: ignore[attr-defined]
    assert {session for (session,) in rows} == {writer.id, pinner.id}
    for member in (writer, pinner, reader):
        member.goodbye()
    eventually(lambda: not store._writing.read("SELECT * FROM writers", ()).result(SECONDS), "none is left")  # type: ignore[attr-defined]
