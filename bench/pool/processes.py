# SPDX-License-Identifier: Apache-2.0
"""A master without nodes, and the echo that it is compared with, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonpool.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["EchoProcess", "MasterProcess", "Process"]

_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 10.0
_SHOWN: Final = 2000


class Process:
    """A process that writes one line with its address when it serves, and that ends with this one. A context manager.

    Args:
        what: for people.
        arguments: of Python. ``{tied}`` and ``{ready}`` stand for descriptors: the reading end of a pipe that is open
            for as long as this process, and where the line goes.
        environment: variables that are set.

    Raises:
        BenchError: it ended, or did not serve in time; the cause is what it wrote.
    """

    def __init__(self, what: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.what = what
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - kept as long as the process
        tied, self._tie = os.pipe()
        ready, done = os.pipe()
        given = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
        given["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, *(part.format(tied=tied, ready=done) for part in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(tied, done),
                env={**given, **environment},
                # Ctrl-C in a terminal is for the benchmark, which ends the others when it is done with them.
                start_new_session=True,
            )
            os.close(done)
            done = -1
            self.address = self._wait_ready(ready)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in (tied, ready, done):
                if fd >= 0:
                    os.close(fd)

    def _wait_ready(self, ready: int) -> str:
        deadline = time.monotonic() + _START_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(ready, 4096) if readable else b""
            if not part:
                how = "did not start" if readable else "did not serve in time"
                raise BenchError(f"the {self.what} {how}", cause=self._said())
            line += part
        return line.decode().split()[-1]

    def _said(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _SHOWN, max(0, size - _SHOWN)).decode(errors="replace").strip()

    @property
    def rss_bytes(self) -> int:
        """Resident memory.

        Raises:
            BenchError: it has ended.
        """
        try:
            text = Path(f"/proc/{self._popen.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise BenchError(f"the {self.what} has ended", cause=self._said()) from error
        found = re.search(r"^VmRSS:\s*(\d+) kB$", text, re.MULTILINE)
        if found is None:
            raise BenchError(f"the {self.what} has ended", cause=self._said())
        return int(found[1]) * 1024

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds of the threads that it has; None where the kernel does not count them in nanoseconds."""
        try:
            texts = [
                path.read_text(encoding="ascii") for path in Path(f"/proc/{self._popen.pid}/task").glob("*/schedstat")
            ]
        except OSError:  # one of the threads has just ended, or there is no such file
            return None
        return sum(int(text.split()[0]) for text in texts) / 1e9 if texts else None

    def kill(self) -> None:
        """As ``kill -9``, and reap it."""
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """Ask it to end, then make it. Calling it again does nothing."""
        popen = getattr(self, "_popen", None)
        if popen is not None and popen.poll() is None:
            popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(_STOP_SECONDS)
            self.kill()
        if self._tie >= 0:
            os.close(self._tie)
            self._tie = -1
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MasterProcess(Process):
    """A master.

    Args:
        store: where it keeps metadata, as its option has it.
        listen: its address; port 0 picks a free one.
    """

    def __init__(self, store: str, listen: str = "127.0.0.1:0") -> None:
        arguments = ["-m", "moonpool._tied", "{tied}", "master", "--listen", listen, "--store", store, "--http", "none"]
        super().__init__("master", [*arguments, "--ready-fd", "{ready}"], {})


class EchoProcess(Process):
    """See `moonpool.bench.pool.echo`."""

    def __init__(self) -> None:
        super().__init__("echo", ["-m", "moonpool.bench.pool.echo", "{tied}", "{ready}"], {})
