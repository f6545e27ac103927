# SPDX-License-Identifier: Apache-2.0
"""A master without nodes, and the echo that it is compared with, as processes of their own."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonpool.bench.errors import BenchError
from moonpool.cluster import READY, TIED, ClusterError, TiedProcess, environment_without_settings, tied_command

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EchoProcess", "MasterProcess", "Process", "store_in"]

_START_SECONDS: Final = 120.0


class Process(TiedProcess):
    """A process that writes its address, as the last word of a line, when it serves. A context manager.

    Args:
        what: for people.
        arguments: of Python, as `TiedProcess` has them.

    Raises:
        BenchError: it ended, or did not serve in time; the cause is what it wrote.
    """

    def __init__(self, what: str, arguments: list[str]) -> None:
        super().__init__(what, arguments, environment_without_settings())
        try:
            self.address = self.wait_ready(time.monotonic() + _START_SECONDS).split()[-1]
        except ClusterError as error:
            raise BenchError(error.message, cause=error.cause) from error
        except BaseException:
            self.end()
            raise

    @property
    def rss_bytes(self) -> int:
        """Resident memory.

        Raises:
            BenchError: it has ended.
        """
        try:
            text = Path(f"/proc/{self.popen.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise BenchError(f"the {self.what} has ended", cause=self.said()) from error
        found = re.search(r"^VmRSS:\s*(\d+) kB$", text, re.MULTILINE)
        if found is None:
            raise BenchError(f"the {self.what} has ended", cause=self.said())
        return int(found[1]) * 1024

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds of the threads that it has; None where the kernel does not count them in nanoseconds."""
        try:
            texts = [
                path.read_text(encoding="ascii") for path in Path(f"/proc/{self.popen.pid}/task").glob("*/schedstat")
            ]
        except OSError:  # one of the threads has just ended, or there is no such file
            return None
        return sum(int(text.split()[0]) for text in texts) / 1e9 if texts else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class MasterProcess(Process):
    """A master.

    Args:
        store: where it keeps metadata, as its option has it.
        listen: its address; port 0 picks a free one.
    """

    def __init__(self, store: str, listen: str = "127.0.0.1:0") -> None:
        super().__init__("master", tied_command("master", "--listen", listen, "--store", store, "--http", "none"))


def store_in(kind: str, folder: str) -> str:
    """Return where a master keeps metadata, as its option has it; in the folder where it is ``sqlite``."""
    return f"sqlite:{folder}/master.db" if kind == "sqlite" else kind


class EchoProcess(Process):
    """See `moonpool.bench.pool.echo`."""

    def __init__(self) -> None:
        super().__init__("echo", ["-m", "moonpool.bench.pool.echo", TIED, READY])
