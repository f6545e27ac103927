# SPDX-License-Identifier: Apache-2.0
"""The file that a node keeps chunks in, and the copies to and from it, with disks that fail."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_testing.leaks import nothing_left_behind
from store_testing import content, key

from moonpool._index import extent_bytes
from moonpool.errors import ConfigError
from moonpool.node.diskcopying import DiskCopier
from moonpool.node.errors import DiskError
from moonpool.node.slab import BLOCK, ShortReadError, Slab, SlabPlace
from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.leaves import leaves_of
from moonpool.store_client.packing import DIGEST_WORD, headers_of
from moonpool.transfer_engine import TransferEngine, digest, digest_batch

MIB = 1 << 20
MEMORY, DISK = 5, 6
#: As in a Copy.
EXTENT = np.dtype(
    [
        ("generation", "<u8"), ("there", "<u8"), ("here", "<u8"), ("length", "<u8"),
        ("shard", "<u4"), ("zero", "<u4"), ("hash", "<u8", (4,)),
    ]
)  # fmt: skip
#: One leaf and several, below, at and above a block, and more than a thread reads at once.
LENGTHS = (1, 4032, 4033, 60_000, 262_144, 262_145, MIB, 5 * MIB + 3)


# ---------------------------------------------------------------- the file


def test_a_slab_is_the_same_one_after_a_restart(tmp_path: Path) -> None:
    place = SlabPlace.parse(f"{tmp_path}:1MiB")
    assert place.path == tmp_path / "moonpool.slab"
    block = memoryview(mmap.mmap(-1, BLOCK))
    with nothing_left_behind():
        slab = Slab(place)
        identity = slab.identity
        assert (any(identity), slab.segment) == (True, 0)
        slab.keep(b"c" * 16, 7)
        block[:] = b"x" * BLOCK
        slab.write(MIB - BLOCK, block)
        slab.sync()
        slab.close()
        slab.close()
    assert place.path.stat().st_blocks * 512 >= MIB, "its space is taken from the start"
    slab = Slab(place)
    assert (slab.identity, slab.segment) == (identity, 7)
    block[:] = bytes(BLOCK)
    slab.read(MIB - BLOCK, block)
    assert bytes(block) == b"x" * BLOCK
    slab.format("")
    assert slab.identity != identity
    assert slab.segment == 0
    slab.close()


def test_a_slab_of_another_size_or_with_damaged_facts_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    slab = Slab(SlabPlace(path, MIB))
    slab.keep(bytes(16), 3)
    slab.close()
    for size, before in ((2 * MIB, "1MiB"), (MIB, "2MiB")):
        slab = Slab(SlabPlace(path, size))
        assert slab.segment == 0
        assert f"it was of {before}" in slab.note
        assert path.stat().st_size == size + 16 * BLOCK
        slab.keep(bytes(16), 3)
        slab.close()
    with path.open("r+b") as file:
        file.seek(10)
        file.write(b"?")
    slab = Slab(SlabPlace(path, MIB))
    assert slab.segment == 0
    assert "damaged" in slab.note
    slab.close()
    # Where nothing is lost nothing is said.
    assert [Slab(SlabPlace(one, MIB)).note for one in (path, tmp_path / "new")] == ["", ""]


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"data of somebody else")
    with nothing_left_behind():
        with pytest.raises(DiskError, match="something else"):
            Slab(SlabPlace(path, MIB))
        assert path.read_bytes() == b"data of somebody else"
        with pytest.raises(DiskError, match="opened"):
            Slab(SlabPlace(tmp_path / "no" / "such", MIB))
    slab = Slab(SlabPlace(tmp_path / "slab", MIB))
    with pytest.raises(DiskError, match="in use"):
        Slab(SlabPlace(tmp_path / "slab", MIB))
    slab.close()


def test_more_than_the_file_system_has_is_refused(tmp_path: Path) -> None:
    with nothing_left_behind(), pytest.raises(ConfigError, match="left") as caught:
        Slab(SlabPlace(tmp_path / "slab", 1 << 50))
    assert caught.value.hint
    for text in ("", "/tmp", "/tmp:", ":1GiB", "/tmp:1GB", "/tmp:4KiB", "/tmp:1048577", "/tmp:lots"):
        with pytest.raises(ConfigError):
            SlabPlace.parse(text)


def test_a_file_system_without_direct_reads_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some take the flag when the file is opened, and refuse what is written then."""
    direct: set[int] = set()
    opened, written = os.open, os.pwritev

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = opened(path, flags, mode)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def pwritev(fd: int, buffers: list[memoryview], at: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "not here")
        return written(fd, buffers, at)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with nothing_left_behind():
        slab = Slab(SlabPlace(tmp_path / "slab", MIB))
        assert not slab.direct
        assert "page cache" in caplog.text
        slab.close()


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    slab = Slab(SlabPlace(tmp_path / "slab", MIB))
    os.truncate(slab.path, 17 * BLOCK)
    block = memoryview(mmap.mmap(-1, 2 * BLOCK))
    slab.read(0, block[:BLOCK])
    with pytest.raises(ShortReadError):
        slab.read(0, block)
    slab.close()


# ---------------------------------------------------------------- copies


class Failing(Slab):
    """A disk that fails when it is told to."""

    fails: Callable[[str, int], None] = staticmethod(lambda what, at: None)

    def read(self, offset: int, buffer: memoryview) -> None:
        self.fails("read", offset)
        super().read(offset, buffer)

    def write(self, offset: int, buffer: memoryview) -> None:
        self.fails("write", offset)
        super().write(offset, buffer)

    def sync(self) -> None:
        self.fails("sync", 0)
        super().sync()


class Setup:
    """Memory with chunks in it, a disk, and the copies between them."""

    def __init__(self, folder: Path) -> None:
        self.slab = Failing(SlabPlace(folder / "slab", 32 * MIB))
        self.slab.keep(bytes(16), DISK)
        self.engine = TransferEngine(name="node")
        self.region = self.engine.allocate(32 * MIB, name="pool")
        self.memory = memoryview(self.region).cast("B")
        self.failures: list[str] = []
        incarnation = bytes.fromhex(self.engine.incarnation)
        self.copier = DiskCopier(self.slab, self.region, incarnation, "test", 3, self.failures.append)
        self.copier.memory = MEMORY
        self.extents = np.zeros(len(LENGTHS), dtype=EXTENT)
        there = here = 0
        for number, length in enumerate(LENGTHS):
            size = extent_bytes(length)
            self.extents[number] = (number + 1, there, here, length, number, 0, np.frombuffer(key(number), dtype="<u8"))
            there, here = there + -(-size // 64) * 64, here + -(-size // BLOCK) * BLOCK
        self.fill()

    def fill(self) -> None:
        for row, extent in enumerate(self.extents):
            length, at = int(extent["length"]), int(extent["there"])
            payload = content(key(row), length)
            header = headers_of(self.extents[row : row + 1], extent["hash"], np.uint64(row))
            header[:, DIGEST_WORD] = np.frombuffer(digest(payload).to_bytes(8, "little"), dtype="<u8")
            leaves = leaves_of(np.array([length]))
            table = digest_batch(payload, leaves.starts, leaves.lengths) if len(leaves.starts) > 1 else b""
            whole = header.tobytes() + payload + table
            assert len(whole) == extent_bytes(length)
            self.memory[at : at + len(whole)] = whole

    def copy(self, *, up: bool, rows: list[int] | None = None, deadline_ms: int = 30_000) -> pb.Copy:
        """Return what the master would ask for."""
        extents = self.extents if rows is None else self.extents[rows]
        if up:
            extents = extents.copy()
            extents["there"], extents["here"] = extents["here"].copy(), extents["there"].copy()
        source = pb.Segment(segment=DISK if up else MEMORY, incarnation=bytes.fromhex(self.engine.incarnation))
        return pb.Copy(
            copy=1, source=source, segment=MEMORY if up else DISK, extents=extents.tobytes(), deadline_ms=deadline_ms
        )

    def ask(self, *, up: bool, rows: list[int] | None = None, deadline_ms: int = 30_000) -> list[int]:
        """Return the statuses of a copy."""
        answers: queue.Queue[pb.CopyDone] = queue.Queue()
        self.copier.take(self.copy(up=up, rows=rows, deadline_ms=deadline_ms), answers.put)
        return list(answers.get(timeout=60).statuses)

    def forget(self) -> bytes:
        """Return what is in memory, and overwrite it."""
        before = bytes(self.memory)
        self.memory[:] = b"\xee" * len(self.memory)
        return before

    def close(self) -> None:
        assert self.copier.close()
        self.memory.release()
        self.engine.close()
        self.slab.close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    with nothing_left_behind():
        made = Setup(tmp_path)
        yield made
        made.close()


def test_what_goes_to_the_disk_comes_back(setup: Setup) -> None:
    assert setup.ask(up=False) == [pb.OK] * len(LENGTHS)
    before = setup.forget()
    assert setup.ask(up=True) == [pb.OK] * len(LENGTHS)
    for extent in setup.extents:
        at, size = int(extent["there"]), extent_bytes(int(extent["length"]))
        assert setup.memory[at : at + size] == before[at : at + size]
    last = int(setup.extents[-1]["there"]) + extent_bytes(LENGTHS[-1])
    assert setup.memory[last:] == b"\xee" * (len(setup.memory) - last), "nothing beside them is written"
    assert setup.copier.counts["read_bytes"] == setup.copier.counts["written_bytes"] == sum(LENGTHS)


@pytest.mark.parametrize("where", ["header", "payload", "table"])
def test_damage_is_not_copied_either_way(setup: Setup, where: str) -> None:
    rows = [3, 6]
    flip = {"header": 20, "payload": 5000, "table": 64 + MIB + 9}[where]
    setup.memory[int(setup.extents[6]["there"]) + flip] ^= 1
    assert setup.ask(up=False, rows=rows) == [pb.OK, pb.SPOILT]
    setup.memory[int(setup.extents[6]["there"]) + flip] ^= 1
    assert setup.ask(up=False, rows=rows) == [pb.OK, pb.OK]
    with setup.slab.path.open("r+b") as file:
        at = 16 * BLOCK + int(setup.extents[6]["here"]) + flip
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))
    assert setup.ask(up=True, rows=rows) == [pb.OK, pb.SPOILT]
    assert not setup.failures, "the disk works"


def test_what_was_never_written_or_is_cut_off_is_spoilt(setup: Setup) -> None:
    assert setup.ask(up=False, rows=[0, 7]) == [pb.OK] * 2
    assert setup.ask(up=True, rows=[1]) == [pb.SPOILT]
    os.truncate(setup.slab.path, 16 * BLOCK + int(setup.extents[7]["here"]) + MIB)
    for _ in range(5):
        assert setup.ask(up=True, rows=[7]) == [pb.SPOILT]
    assert setup.ask(up=True, rows=[0]) == [pb.OK]
    assert not setup.failures


def test_a_disk_that_gives_errors_has_failed_and_memory_goes_on(setup: Setup) -> None:
    assert setup.ask(up=False, rows=[0, 1, 2]) == [pb.OK] * 3

    def fails(what: str, at: int) -> None:
        raise OSError(errno.EIO, f"no {what} at {at}")

    setup.slab.fails = fails  # type: ignore[method-assign]
    assert setup.ask(up=True, rows=[0]) == [pb.SPOILT]
    assert not setup.failures, "one bad place is no bad disk"
    assert setup.ask(up=False, rows=[6]) == [pb.NOT_MOVED]
    assert setup.ask(up=True, rows=[2]) == [pb.SPOILT]
    assert len(setup.failures) == 1
    assert "no read" in setup.failures[0]
    assert setup.copier.counts["errors"] == 3


def test_a_full_disk_is_no_failed_disk(setup: Setup) -> None:
    def fails(what: str, at: int) -> None:
        if what == "write":
            raise OSError(errno.ENOSPC, "full")

    setup.slab.fails = fails  # type: ignore[method-assign]
    for _ in range(5):
        assert setup.ask(up=False, rows=[4]) == [pb.NOT_MOVED]
    assert not setup.failures
    setup.slab.fails = lambda what, at: None  # type: ignore[method-assign]
    assert setup.ask(up=False, rows=[4]) == [pb.OK]


def test_without_a_sync_nothing_is_there(setup: Setup) -> None:
    def fails(what: str, at: int) -> None:
        if what == "sync":
            raise OSError(errno.EIO, "no sync")

    setup.slab.fails = fails  # type: ignore[method-assign]
    assert setup.ask(up=False, rows=[0, 1]) == [pb.NOT_MOVED] * 2
    assert setup.failures, "what a failed sync has lost no later one tells"


def test_what_is_given_up_writes_into_memory_no_more(setup: Setup) -> None:
    assert setup.ask(up=False, rows=[6]) == [pb.OK]
    reading, goes_on = threading.Event(), threading.Event()

    def fails(what: str, at: int) -> None:
        reading.set()
        assert goes_on.wait(60)

    setup.slab.fails = fails  # type: ignore[method-assign]
    setup.forget()
    answers: list[pb.CopyDone] = []
    setup.copier.take(setup.copy(up=True, rows=[6]), answers.append)
    assert reading.wait(60)
    # The disk hangs. That is no reason to wait: what it gives later goes nowhere.
    assert not setup.copier.end_all(0.05)
    goes_on.set()
    assert setup.copier.end_all(30)
    assert bytes(setup.memory) == b"\xee" * len(setup.memory)
    assert not answers, "what was given up is not answered"
    setup.slab.fails = lambda what, at: None  # type: ignore[method-assign]
    assert setup.ask(up=True, rows=[6], deadline_ms=0) == [pb.NOT_MOVED]
    assert setup.ask(up=True, rows=[6]) == [pb.OK]


def test_nonsense_is_refused(setup: Setup) -> None:
    copy = pb.Copy(source=pb.Segment(segment=9), segment=8)
    assert not setup.copier.serves(copy)
    for name, value in (("here", 32 * MIB), ("there", 32 * MIB), ("here", 64)):
        old = int(setup.extents[0][name])
        setup.extents[0][name] = value
        assert setup.ask(up=False, rows=[0]) == [pb.NOT_MOVED]
        setup.extents[0][name] = old
    setup.copier.memory = 99
    assert setup.ask(up=True, rows=[0]) == [pb.NOT_MOVED]
