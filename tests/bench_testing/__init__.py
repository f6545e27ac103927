# SPDX-License-Identifier: Apache-2.0
"""What tests of the benchmark share."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from moonpool.bench.errors import ExitStatus

__all__ = ["Terminal", "interrupt"]


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


def interrupt(terminal: Terminal, file: Path, *, children: int) -> tuple[str, dict[str, Any]]:
    """Press Ctrl-C in the third of 1000 rounds of the first row. Return standard output, and the row in `file`."""
    terminal.wait_for("round 3 of 1000")
    pids = terminal.children()
    assert len(pids) == children
    terminal.send(signal.SIGINT)
    status, output = terminal.ended()
    assert status == ExitStatus.INTERRUPTED
    assert " ok" in output
    result = json.loads(file.read_text())
    assert result["interrupted"]
    (row,) = result["rows"]
    assert row["rounds"] >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "processes that it started are still there"
    return output, row
