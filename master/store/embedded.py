# SPDX-License-Identifier: Apache-2.0
"""A store in one SQLite file: write-ahead log, every commit synchronous, one thread that writes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from moonpool.master.errors import StoreBusyError, StoreDamagedError, StoreUnavailableError
from moonpool.master.store.base import EPOCH_MAX, Identity, MetadataStore, SegmentRow, Writer
from moonpool.master.store.packing import split_records
from moonpool.master.store.rows import Rows, text_or_bytes
from moonpool.master.store.writing import Change, WriteQueue

__all__ = ["EmbeddedStore"]

T = TypeVar("T")

# "MPMD": so that the file of another program is not taken for ours, nor ours for theirs.
_APPLICATION: Final = 0x4D504D44
_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    # AUTOINCREMENT: the number of a removed segment is not given again.
    "CREATE TABLE segments (segment INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, host_id TEXT NOT NULL,"
    " address TEXT NOT NULL, region TEXT NOT NULL, incarnation BLOB NOT NULL, capacity_bytes INTEGER NOT NULL,"
    " draining INTEGER NOT NULL, lost INTEGER NOT NULL)",
    "CREATE TABLE namespaces (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    "CREATE TABLE writers (session BLOB PRIMARY KEY, incarnation BLOB NOT NULL) WITHOUT ROWID",
    # The slot is the place in the file: rows are appended, or written where the slot's last chunk was.
    "CREATE TABLE chunks (slot INTEGER PRIMARY KEY, record BLOB NOT NULL)",
)
# One statement for so many rows at once. A step of SQLite gives up the GIL and has to get it back from the event loop,
# so many small steps would wait for it many times.
_ROWS: Final = (256, 64, 16, 4, 1)
_WRITE: Final = {n: "INSERT OR REPLACE INTO chunks VALUES " + ",".join(["(?,?)"] * n) for n in _ROWS}
_DELETE: Final = {n: f"DELETE FROM chunks WHERE slot IN ({','.join('?' * n)})" for n in _ROWS}
_SEGMENT_COLUMNS: Final = "segment, node, host_id, address, region, incarnation, capacity_bytes, draining, lost"
_SEGMENT_END: Final = (1 << 32) - 1
_MOVE_AWAY: Final = "move it away: the pool starts empty then"
_FULL: Final = ("full", "disk I/O error", "readonly", "unable to open")


class EmbeddedStore(MetadataStore):
    """Keeps everything in a SQLite file that no other process can open meanwhile.

    Args:
        path: the file. Its folder must be there. ``-wal`` is appended for the write-ahead log.
        pages_max: most pages of 4 KiB that the file may have; None: as many as the disk has.
    """

    def __init__(self, path: Path, *, pages_max: int | None = None) -> None:
        self._path = path
        self._pages_max = pages_max
        self._database: sqlite3.Connection | None = None
        self._queue: WriteQueue | None = None
        self._last_segment = 0
        self._rows = Rows()

    def open(self, address: str = "") -> Identity:
        """Open the file, or make it."""
        del address
        self._database = self._attempt("open", self._connect)
        try:
            identity = self._attempt("open", self._enter)
            self._last_segment = self._attempt("read", self._find_last_segment)
        except BaseException:
            self._database.close()
            raise
        self._queue = WriteQueue(self._database, lambda error: self._error("write to", error))
        return identity

    def _connect(self) -> sqlite3.Connection:
        # The writer's thread uses it after this one has loaded everything: never two at once.
        database = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        database.text_factory = text_or_bytes
        return database

    def _enter(self) -> Identity:
        run = self._connection.execute
        # Before the first access: then there is no shared memory beside the file, and nobody else gets in.
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        if self._pages_max is not None:
            run(f"PRAGMA max_page_count = {self._pages_max}")
        run("BEGIN EXCLUSIVE")
        self._make_or_check_schema()
        known = run("SELECT value FROM meta WHERE key = 'cluster_id'").fetchone()
        cluster_id = known[0] if known else os.urandom(16)
        before = (run("SELECT value FROM meta WHERE key = 'epoch'").fetchone() or (0,))[0]
        if not isinstance(cluster_id, bytes) or len(cluster_id) != 16 or not isinstance(before, int) or before < 0:
            raise StoreDamagedError(f"{self._path} has no cluster id or epoch that makes sense", hint=_MOVE_AWAY)
        epoch = before + 1
        if epoch > EPOCH_MAX:
            raise StoreDamagedError(f"{self._path} has been opened {epoch - 1} times", hint="a new store")
        self._connection.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [("cluster_id", cluster_id), ("epoch", epoch)]
        )
        run("COMMIT")
        return Identity(cluster_id, epoch)

    def _make_or_check_schema(self) -> None:
        run = self._connection.execute
        application, version = run("PRAGMA application_id").fetchone()[0], run("PRAGMA user_version").fetchone()[0]
        if application == 0 and version == 0 and run("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
            for statement in _SCHEMA:
                run(statement)
            run(f"PRAGMA application_id = {_APPLICATION}")
            run(f"PRAGMA user_version = {_VERSION}")
        elif application != _APPLICATION:
            raise StoreDamagedError(f"{self._path} is the database of another program", hint="another path")
        elif version != _VERSION:
            raise StoreDamagedError(
                f"{self._path} has version {version} of the schema, this program reads {_VERSION}",
                hint="the version of Moonpool that made it",
            )

    def _find_last_segment(self) -> int:
        row = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'segments'").fetchone()
        largest = self._connection.execute("SELECT max(segment) FROM segments").fetchone()[0] or 0
        last = row[0] if row else 0
        if not isinstance(last, int) or not largest <= last < _SEGMENT_END:
            # A number that is given twice would name memory of another node.
            raise StoreDamagedError(f"{self._path} does not say which segments there were", hint=_MOVE_AWAY)
        return last

    # ---------------------------------------------------------------- reading, before anything is written

    def segments(self) -> list[SegmentRow]:
        """Return every segment."""
        return self._rows.segments(self._read(f"SELECT {_SEGMENT_COLUMNS} FROM segments ORDER BY segment"))

    def namespaces(self) -> dict[str, int]:
        """Return the number of each namespace."""
        return self._rows.namespaces(self._read("SELECT number, name FROM namespaces"))

    def writers(self) -> list[Writer]:
        """Return every writer."""
        return self._rows.writers(self._read("SELECT session, incarnation FROM writers"))

    def load(self, page: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield every record."""
        after = -(1 << 63)
        while rows := self._read("SELECT slot, record FROM chunks WHERE slot > ? ORDER BY slot LIMIT ?", after, page):
            after = rows[-1][0]
            yield self._rows.chunks(rows)
        self._rows.warn(self._path)
        if stray := self._rows.stray_slots:
            doomed = [(slot,) for slot in stray]
            self._submit(lambda database: database.executemany("DELETE FROM chunks WHERE slot = ?", doomed))

    def _read(self, query: str, *values: Any) -> list[Any]:
        # On the writer's thread, after everything that was asked for before.
        return self._attempt("read", lambda: self._writing.read(query, values).result())

    # ---------------------------------------------------------------- writing

    def apply(self, slots: bytes, records: bytes, deletes: bytes) -> Future[None]:
        """Write and delete records."""

        def change(database: sqlite3.Connection) -> None:
            if slots:
                _in_blocks(database, _WRITE, 2, _alternating(memoryview(slots).cast("I"), split_records(records)))
            if deletes:
                _in_blocks(database, _DELETE, 1, memoryview(deletes).cast("I").tolist())

        return self._submit(change, len(slots) // 4, len(deletes) // 4)

    def new_segment(self) -> int:
        """Return a number that no segment has ever had."""
        return self._last_segment + 1

    def put_segment(self, row: SegmentRow) -> Future[None]:
        """Write a segment."""
        self._last_segment = max(self._last_segment, row.segment)
        values = (row.segment, row.node, row.host_id, row.address, row.region, row.incarnation, row.capacity_bytes)
        return self._run("INSERT OR REPLACE INTO segments VALUES (?,?,?,?,?,?,?,?,?)", *values, row.draining, row.lost)

    def remove_segment(self, segment: int) -> Future[None]:
        """Remove a segment."""
        return self._run("DELETE FROM segments WHERE segment = ?", segment)

    def put_namespace(self, name: str, number: int) -> Future[None]:
        """Name a namespace."""
        return self._run("INSERT OR REPLACE INTO namespaces VALUES (?, ?)", number, name)

    def put_writer(self, writer: Writer) -> Future[None]:
        """Remember a writer."""
        return self._run("INSERT OR REPLACE INTO writers VALUES (?, ?)", writer.session, writer.incarnation)

    def remove_writers(self, sessions: list[bytes]) -> Future[None]:
        """Forget writers."""

        def change(database: sqlite3.Connection) -> None:
            database.executemany("DELETE FROM writers WHERE session = ?", [(session,) for session in sessions])

        return self._submit(change)

    def _run(self, statement: str, *values: Any) -> Future[None]:
        return self._submit(lambda database: database.execute(statement, values))

    def _submit(self, change: Change, writes: int = 0, deletes: int = 0) -> Future[None]:
        return self._writing.submit(change, writes, deletes)

    def stats(self) -> dict[str, int]:
        """Return counters."""
        return {**self._writing.stats(), **{f"refused_{table}": count for table, count in self._rows.refused.items()}}

    def close(self) -> None:
        """Carry out what waits, and close the file."""
        if self._queue is not None:
            self._queue.close()
        if self._database is not None:
            self._database.close()

    # ---------------------------------------------------------------- errors

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._database is not None, "open() comes first"
        return self._database

    @property
    def _writing(self) -> WriteQueue:
        assert self._queue is not None, "open() comes first"
        return self._queue

    def _attempt(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            # SQLite quotes what it cannot read in its errors, which need not be text then.
            raise self._error(what, error) from error

    def _error(self, what: str, error: Exception) -> Exception:
        text = str(error)
        message = f"could not {what} the metadata store {self._path}"
        if "locked" in text:
            return StoreBusyError(message, cause="another process has it open", hint="stop that one, or another path")
        if isinstance(error, sqlite3.OperationalError) and any(word in text for word in _FULL):
            return StoreUnavailableError(message, cause=text, retryable=True, hint="see the disk and its permissions")
        if isinstance(error, (sqlite3.Error, UnicodeDecodeError, OverflowError)):
            return StoreDamagedError(message, cause=text, hint=_MOVE_AWAY)
        return error


def _alternating(slots: memoryview, records: list[bytes]) -> list[Any]:
    if len(slots) != len(records):
        raise ValueError(f"{len(slots)} slots and {len(records)} records")
    values: list[Any] = [None] * (2 * len(records))
    values[::2] = slots
    values[1::2] = records
    return values


def _in_blocks(database: sqlite3.Connection, statements: dict[int, str], width: int, values: list[Any]) -> None:
    """Run a statement over rows of `width` values, as many rows at a time as there is a statement for."""
    place = 0
    for rows in _ROWS:
        step = rows * width
        while len(values) - place >= step:
            database.execute(statements[rows], values[place : place + step])
            place += step
