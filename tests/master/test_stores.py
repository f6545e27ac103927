# SPDX-License-Identifier: Apache-2.0
"""The contract of metadata stores, over each of them; then what only the one in a file can meet."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.errors import ConfigError
from moonpool.master.errors import StoreBusyError, StoreDamagedError, StoreUnavailableError
from moonpool.master.store import EmbeddedStore, EtcdStore, MemoryStore, MetadataStore, SegmentRow, Writer, open_store

SECONDS = 60.0
Reopen = Callable[[], MetadataStore]


def slots(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def record(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def write(store: MetadataStore, content: dict[int, bytes]) -> None:
    store.apply(slots(*content), b"".join(map(record, content.values())), b"").result(SECONDS)


def read(store: MetadataStore, page: int = 3) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for numbers, records in store.load(page):
        place = 0
        assert len(numbers) // 4 <= page
        for number in memoryview(numbers).cast("I"):
            length = int.from_bytes(records[place : place + 4], "little")
            found[number] = records[place + 4 : place + 4 + length]
            place += 4 + length
        assert place == len(records)
    return found


def row(segment: int, **more: object) -> SegmentRow:
    return SegmentRow(segment, f"node-{segment}", "host", "127.0.0.1:1", "pool", os.urandom(16), 1 << 30, **more)  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Opens the store, after closing it if it was open."""
    kind, memory = request.param, MemoryStore()
    options = request.getfixturevalue("etcd_options")() if kind == "etcd" else None
    opened: list[MetadataStore] = []

    def reopen_() -> MetadataStore:
        if opened:
            opened[-1].close()
        if options is not None:
            opened.append(EtcdStore(options))
        else:
            opened.append(memory if kind == "memory" else EmbeddedStore(tmp_path / "master.db"))
        return opened[-1]

    yield reopen_
    opened[-1].close()


def test_the_cluster_stays_and_the_epoch_grows(reopen: Reopen) -> None:
    first = reopen().open()
    again = [reopen().open() for _ in range(3)]
    assert len(first.cluster_id) == 16
    assert {identity.cluster_id for identity in again} == {first.cluster_id}
    epochs = [identity.epoch for identity in (first, *again)]
    assert sorted(set(epochs)) == epochs


def test_records_are_there_after_opening_again(reopen: Reopen) -> None:
    store = reopen()
    store.open()
    assert read(store) == {}
    content = {number: os.urandom(number % 300) for number in (0, 1, 2, 7, 1000, 2**32 - 2, *range(2000, 2700))}
    write(store, content)
    assert read(store) == content
    store = reopen()
    store.open()
    assert read(store, page=100) == content


def test_a_slot_is_overwritten_and_deleted(reopen: Reopen) -> None:
    store = reopen()
    store.open()
    write(store, {1: b"one", 2: b"two", 3: b"three"})
    store.apply(slots(2, 4), record(b"TWO") + record(b"four"), slots(3, 99)).result(SECONDS)
    assert read(store) == {1: b"one", 2: b"TWO", 4: b"four"}


def test_changes_happen_in_the_order_in_which_they_were_asked_for(reopen: Reopen) -> None:
    store = reopen()
    store.open()
    futures = []
    expected: dict[int, bytes] = {}
    chance = random.Random(7)
    for turn in range(500):
        slot, text = chance.randrange(20), b"%d" % turn
        if chance.random() < 0.3:
            futures.append(store.apply(b"", b"", slots(slot)))
            expected.pop(slot, None)
        else:
            futures.append(store.apply(slots(slot), record(text), b""))
            expected[slot] = text
    for future in futures:
        future.result(SECONDS)
    assert read(store) == expected
    assert store.stats()["failures"] == 0
    assert store.stats()["waiting"] == 0


def test_segments_namespaces_and_writers_are_kept(reopen: Reopen) -> None:
    store = reopen()
    store.open()
    rows = [row(1), row(2, draining=True), row(3, lost=True)]
    writers = [Writer(os.urandom(16), os.urandom(16)) for _ in range(3)]
    changes = [store.put_segment(one) for one in rows]
    changes += [store.put_namespace("llama", 1), store.put_namespace("qwen", 2)]
    changes += [store.put_writer(writer) for writer in writers]
    changes.append(store.remove_writers([writers[1].session, b"nobody".ljust(16)]))
    for change in changes:
        change.result(SECONDS)
    store = reopen()
    store.open()
    assert store.segments() == rows
    assert store.namespaces() == {"llama": 1, "qwen": 2}
    assert sorted(writer.session for writer in store.writers()) == sorted([writers[0].session, writers[2].session])


def test_the_number_of_a_segment_is_never_given_twice(reopen: Reopen) -> None:
    store = reopen()
    store.open()
    assert store.new_segment() == 1
    store.put_segment(row(1)).result(SECONDS)
    store.put_segment(row(2)).result(SECONDS)
    store.remove_segment(2).result(SECONDS)
    assert store.new_segment() == 3
    store = reopen()
    store.open()
    assert store.new_segment() == 3
    assert [one.segment for one in store.segments()] == [1]


def test_after_close_changes_fail(reopen: Reopen) -> None:
    store = reopen()
    store.open()
    store.close()
    with pytest.raises(StoreUnavailableError):
        store.apply(slots(1), record(b"late"), b"").result(SECONDS)


@pytest.mark.parametrize(
    "name", ["", "sqlite", "sqlite:", "memory:x", "etcd", "etcd:", "etcd:localhost", "etcd:h:1/a b"]
)
def test_an_unknown_store_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        open_store(name)


# ---------------------------------------------------------------- in a file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "master.db"


_WRITES_FOR_EVER = """
import struct, sys
from array import array
from pathlib import Path
from moonpool.master.store import EmbeddedStore
store = EmbeddedStore(Path(sys.argv[1])); store.open()
for turn in range(1 << 30):
    record = struct.pack("<IQ", 8, turn)
    # Two slots in one change: a part of it would show.
    store.apply(array("I", [turn % 100, 100 + turn % 100]).tobytes(), record * 2, b"").result()
    print(turn, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_loses_nothing_that_was_durable_and_halves_no_change(path: Path, seed: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", _WRITES_FOR_EVER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = -1
    for _ in range(50 + 37 * seed):
        last = int(process.stdout.readline())
    time.sleep(random.Random(seed).random() / 50)
    process.send_signal(signal.SIGKILL)
    last = int(([str(last), *process.stdout.read().split()])[-1])
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    store = EmbeddedStore(path)
    store.open()
    found = {slot: struct.unpack("<Q", text)[0] for slot, text in read(store, 1000).items()}
    store.close()
    # One more may have become durable without having been said.
    assert max(found.values()) in (last, last + 1)
    for slot in range(100):
        assert found.get(slot) == found.get(slot + 100)
    for turn in range(max(0, last - 99), last + 1):
        assert found[turn % 100] >= turn


def test_a_full_disk_refuses_changes_and_takes_them_again_when_there_is_room(path: Path) -> None:
    store = EmbeddedStore(path, pages_max=40)
    store.open()
    write(store, {0: b"before"})
    failed = 0
    for number in range(1, 300):
        change = store.apply(slots(number), record(os.urandom(2000)), b"")
        error = change.exception(SECONDS)
        if error is not None:
            assert isinstance(error, StoreUnavailableError)
            assert error.retryable
            failed += 1
    assert failed > 100
    # What was refused has changed nothing, and what was taken is there.
    content = read(store, 1000)
    assert content[0] == b"before"
    assert len(content) == 300 - failed
    store.apply(b"", b"", slots(*range(1, 300))).result(SECONDS)
    write(store, {1: b"after"})
    assert read(store) == {0: b"before", 1: b"after"}
    store.close()


def test_another_process_that_has_it_open_is_named(path: Path) -> None:
    code = "import sys; from pathlib import Path; from moonpool.master.store import EmbeddedStore\n"
    code += "s = EmbeddedStore(Path(sys.argv[1])); s.open(); print(1, flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "1\n"
    with pytest.raises(StoreBusyError, match="another process"):
        EmbeddedStore(path).open()
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    store = EmbeddedStore(path)
    assert store.open().epoch == 2
    store.close()


@pytest.mark.parametrize("content", [b"this is no database" * 1000, b"SQLite format 3\0" + bytes(5000), b"\xff" * 4096])
def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError, match=str(path)):
        EmbeddedStore(path).open()
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    other.close()
    with pytest.raises(StoreDamagedError, match="another program"):
        EmbeddedStore(path).open()


def test_a_later_schema_is_refused(path: Path) -> None:
    store = EmbeddedStore(path)
    store.open()
    store.close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreDamagedError, match="version 99"):
        EmbeddedStore(path).open()


def test_damage_in_the_middle_is_an_error_and_no_wrong_record(path: Path) -> None:
    store = EmbeddedStore(path)
    store.open()
    content = {number: os.urandom(200) for number in range(2000)}
    write(store, content)
    store.close()
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8192] = b"\xff" * 8192
    path.write_bytes(data)
    store = EmbeddedStore(path)
    store.open()
    with pytest.raises(StoreDamagedError):
        read(store, 100)
    store.close()


def test_a_folder_that_is_not_there_is_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="nowhere"):
        EmbeddedStore(tmp_path / "nowhere" / "master.db").open()
