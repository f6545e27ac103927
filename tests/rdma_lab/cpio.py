# SPDX-License-Identifier: Apache-2.0
"""Archives that Linux unpacks into its first file system. Several of them behind each other are one file system."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import IO

_ALIGNMENT = 512


class Archive:
    """An archive in the "newc" format, not compressed: copying is cheaper than unpacking on an emulated processor.

    Folders are made as they are needed; a path that was added before is not added again.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._paths: set[PurePosixPath] = {PurePosixPath("/")}

    def folder(self, path: str | PurePosixPath) -> None:
        path = PurePosixPath(path)
        if path not in self._paths:
            self._entry(path, stat.S_IFDIR | 0o755, 0)

    def link(self, path: str | PurePosixPath, target: str) -> None:
        path = PurePosixPath(path)
        if path not in self._paths:
            self._entry(path, stat.S_IFLNK | 0o777, len(target.encode()))
            self._stream.write(target.encode())
            self._pad(4)

    def text(self, path: str | PurePosixPath, content: str, mode: int = 0o644) -> None:
        path = PurePosixPath(path)
        if path not in self._paths:
            self._entry(path, stat.S_IFREG | mode, len(content.encode()))
            self._stream.write(content.encode())
            self._pad(4)

    def file(self, path: str | PurePosixPath, source: Path) -> None:
        """Add a file with its time: Python looks at that to see whether its compiled form is still right."""
        path = PurePosixPath(path)
        if path in self._paths:
            return
        with source.open("rb") as stream:
            about = source.stat()
            self._entry(path, stat.S_IFREG | stat.S_IMODE(about.st_mode), about.st_size, int(about.st_mtime))
            shutil.copyfileobj(stream, self._stream, 1 << 20)
        self._pad(4)

    def close(self) -> None:
        """Write the end mark. The stream stays open, for further archives."""
        self._header("TRAILER!!!", 0, 0, 0)
        self._pad(_ALIGNMENT)

    def _entry(self, path: PurePosixPath, mode: int, size: int, time: int = 0) -> None:
        self.folder(path.parent)
        self._paths.add(path)
        self._header(str(path.relative_to("/")), mode, size, time)

    def _header(self, name: str, mode: int, size: int, time: int) -> None:
        encoded = name.encode() + b"\0"
        # Number, mode, owner, group, links, time, size, device (4 fields), length of the name, checksum (none).
        fields = (len(self._paths), mode, 0, 0, 1, time, size, 0, 0, 0, 0, len(encoded), 0)
        self._stream.write(b"070701" + b"".join(b"%08X" % field for field in fields) + encoded)
        self._pad(4)

    def _pad(self, alignment: int) -> None:
        self._stream.write(bytes(-self._stream.tell() % alignment))
