# SPDX-License-Identifier: Apache-2.0
"""What tests of the benchmark share."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["Terminal", "exists"]


class Terminal:
    """``mooncake-bench`` with a terminal as standard error, so that it says what it does."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "moonpool.bench.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", **(environ or {})},
        )
        os.close(slave)
        self.said = ""

    def wait_for(self, text: str) -> None:
        while text not in self.said:
            self.said += os.read(self._master, 4096).decode()

    def children(self) -> list[int]:
        text = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def send(self, what: signal.Signals) -> None:
        self._process.send_signal(what)

    def ended(self) -> tuple[int, str]:
        """Return the exit status and standard output."""
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        self._process.stdout.close()
        status = self._process.wait(60)
        os.close(self._master)
        return status, output


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
