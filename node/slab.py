# SPDX-License-Identifier: Apache-2.0
"""The file in which a node keeps chunks: one block of facts, one to try the disk with, and the space for extents.

All of its space is taken when it is made, so it never grows, and a disk that others fill does not take it away. Where
chunks lie in it only the master's index says; the file itself says who it is, so that a master can tell it from
another one. It is read and written past the page cache where the file system allows that.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.errors import ConfigError
from moonpool.node.errors import DiskError
from moonpool.transfer_engine import digest
from moonpool.units import format_bytes, parse_bytes

__all__ = ["BLOCK", "EXTENTS_AT", "ShortReadError", "Slab", "SlabPlace"]

_log = logging.getLogger("moonpool.node")
#: Offsets and lengths of everything that is read and written are multiples of it.
BLOCK: Final = 4096
# Where the block to try is.
_TRIED_AT: Final = BLOCK
#: Where the space for extents begins.
EXTENTS_AT: Final = 16 * BLOCK
_MAGIC: Final = b"MPSL"
_VERSION: Final = 1
# Magic, version, identity, cluster, segment, zero, capacity; then comes the digest of all this.
_FACTS: Final = struct.Struct("<4sI16s16sIIQ")
_CAPACITY_MIN: Final = 1 << 20


class ShortReadError(OSError):
    """The file ends before the extent does."""


@dataclass(frozen=True)
class SlabPlace:
    """What the setting `ssd` says: the file, and how large its space for extents is."""

    path: Path
    capacity: int

    @classmethod
    def parse(cls, text: str) -> SlabPlace:
        """Read ``PATH:SIZE``. A folder means the file `moonpool.slab` in it.

        Raises:
            ConfigError: it is something else.
        """
        name, colon, size = text.rpartition(":")
        if not colon or not name or "\0" in name:
            raise ConfigError(f"ssd is {text!r}", hint="a file and how much of the disk it may take: /mnt/nvme:100GiB")
        capacity = parse_bytes(size)
        if capacity < _CAPACITY_MIN or capacity % BLOCK:
            raise ConfigError(
                f"ssd has a size of {capacity} bytes", hint=f"at least {_CAPACITY_MIN}, and a multiple of {BLOCK}"
            )
        path = Path(name)
        return cls(path / "moonpool.slab" if path.is_dir() else path, capacity)


class Slab:
    """The file, open and locked against other processes. Reads and writes may be made by several threads at once.

    Args:
        place: where it is, and how large.

    Attributes:
        identity: 16 bytes, drawn when it was formatted.
        segment: the number that the master gave to it; 0: none yet.
        direct: whether the page cache is passed by.
        note: why it holds nothing though the file was there, for people; "" where it was not, or it does.

    Raises:
        ConfigError: the file system has not that much room.
        DiskError: the file is in use, belongs to something else, or cannot be used.
    """

    def __init__(self, place: SlabPlace) -> None:
        self.path = place.path
        self.capacity = place.capacity
        self.identity = bytes(16)
        self.segment = 0
        self.direct = True
        self.note = ""
        self._lock = threading.Lock()
        self._tries = 0
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._error("cannot be opened", error, "a file that this process may write") from error
        self._data = self._fd
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._error("is in use", error, "one file for each node") from error
        size = os.fstat(self._fd).st_size
        found = os.pread(self._fd, BLOCK, 0)
        if size and found[:4] != _MAGIC and found.strip(b"\0"):
            raise self._error("belongs to something else", None, "another path")
        self._take_space(size)
        self._open_direct()
        if not self._know(found):
            self.format(self._other(found) if found.strip(b"\0") else "")

    def _take_space(self, size: int) -> None:
        whole = EXTENTS_AT + self.capacity
        system = os.fstatvfs(self._fd)
        missing = whole - os.fstat(self._fd).st_blocks * 512
        if missing > system.f_bavail * system.f_frsize:
            raise ConfigError(
                f"ssd is to take {format_bytes(self.capacity)} at {self.path}, and the file system has "
                f"{system.f_bavail * system.f_frsize / (1 << 30):.1f} GiB left",
                hint="less than that, with room for everything else that is kept there",
            )
        try:
            if size > whole:
                os.ftruncate(self._fd, whole)
            os.posix_fallocate(self._fd, 0, whole)
        except OSError as error:
            raise self._error("does not get its space", error, "a smaller size, or another disk") from error

    def _open_direct(self) -> None:
        # Some file systems take the flag and refuse what comes after, so it is tried.
        try:
            self._data = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            self.check()
        except OSError as error:
            if self._data != self._fd:
                os.close(self._data)
            self._data, self.direct = self._fd, False
            _log.warning("%s is read and written through the page cache: %s", self.path, error)
            try:
                self.check()
            except OSError as error:
                raise self._error("cannot be written and read", error, "another disk") from error

    def _know(self, found: bytes) -> bool:
        """Take the facts as the file has them. Returns whether they make sense, and are of this size."""
        if not _sound(found):
            return False
        magic, version, identity, _, segment, _, capacity = _FACTS.unpack_from(found)
        if (magic, version, capacity) != (_MAGIC, _VERSION, self.capacity):
            return False
        self.identity, self.segment = identity, segment
        return True

    def _other(self, found: bytes) -> str:
        """Return why what the file held is of no use."""
        if not _sound(found):
            return f"what {self.path} held is not used: its first block is damaged"
        _, version, *_, capacity = _FACTS.unpack_from(found)
        if version != _VERSION:
            return f"what {self.path} held is not used: it is of version {version}, and this is {_VERSION}"
        sizes = f"it was of {format_bytes(capacity)}, and ssd is of {format_bytes(self.capacity)} now"
        return f"what {self.path} held is not used: {sizes}"

    # ---------------------------------------------------------------- what it says of itself

    def format(self, why: str) -> None:
        """Make it another one, which holds nothing.

        Args:
            why: for people; "" where there was nothing.

        Raises:
            DiskError: the disk does not take it.
        """
        if why:
            _log.warning("%s", why)
        self.note = why
        self.identity, self.segment = os.urandom(16), 0
        self._write_facts(bytes(16))

    def keep(self, cluster: bytes, segment: int) -> None:
        """Note under which number the master of a cluster knows it.

        Raises:
            DiskError: the disk does not take it.
        """
        if segment != self.segment:
            self.segment = segment
            self._write_facts(cluster)

    def _write_facts(self, cluster: bytes) -> None:
        facts = _FACTS.pack(_MAGIC, _VERSION, self.identity, cluster, self.segment, 0, self.capacity)
        block = mmap.mmap(-1, BLOCK)
        block.write(facts + struct.pack("<Q", digest(facts)))
        try:
            self._write(block, 0)
            os.fdatasync(self._data)
        except OSError as error:
            raise self._error("cannot be written", error, "the log of the kernel") from error

    # ---------------------------------------------------------------- extents

    def read(self, offset: int, buffer: memoryview) -> None:
        """Read a part of the space for extents. Buffers are aligned as `BLOCK` says, and so are offsets.

        Raises:
            ShortReadError: the file ends before.
            OSError: the disk does not give it.
        """
        self._read(buffer, EXTENTS_AT + offset)

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write a part of the space for extents. It is there after a crash only when `sync` has returned.

        Raises:
            OSError: the disk does not take it.
        """
        self._write(buffer, EXTENTS_AT + offset)

    def sync(self) -> None:
        """Return when everything that was written is there also after a crash.

        Raises:
            OSError: it is not known to be.
        """
        os.fdatasync(self._data)

    def check(self) -> None:
        """Write a block, and read it back.

        Raises:
            OSError: that does not work.
        """
        with self._lock:
            self._tries += 1
            block = mmap.mmap(-1, BLOCK)
            wrote = self._tries.to_bytes(8, "little") + os.urandom(BLOCK - 8)
            block.write(wrote)
            self._write(block, _TRIED_AT)
            os.fdatasync(self._data)
            block[:] = bytes(BLOCK)
            self._read(block, _TRIED_AT)
            if block[:] != wrote:
                raise OSError("what was written did not come back")

    def close(self) -> None:
        """Close the file, for others to open. Calling it again does nothing."""
        for fd in {self._fd, self._data}:
            if fd >= 0:
                os.close(fd)
        self._fd = self._data = -1

    def _read(self, buffer: memoryview | mmap.mmap, at: int) -> None:
        view = memoryview(buffer)
        while view:
            count = os.preadv(self._data, [view], at)
            if count == 0:
                raise ShortReadError(f"{self.path} ends at {at}")
            view, at = view[count:], at + count

    def _write(self, buffer: memoryview | mmap.mmap, at: int) -> None:
        view = memoryview(buffer)
        while view:
            count = os.pwritev(self._data, [view], at)
            view, at = view[count:], at + count

    def _error(self, what: str, error: OSError | None, hint: str) -> DiskError:
        return DiskError(f"{self.path} {what}", cause=str(error or ""), hint=hint)


def _sound(found: bytes) -> bool:
    """Return whether the first block has facts that are as they were written."""
    whole = len(found) >= BLOCK
    return whole and digest(found[: _FACTS.size]) == struct.unpack_from("<Q", found, _FACTS.size)[0]
