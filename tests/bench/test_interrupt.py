# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C shows what was measured, and leaves no process behind."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.bench.errors import ExitStatus


class Terminal:
    """``mooncake-bench transfer`` with a terminal as standard error, so that it says what it does."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "moonpool.bench.cli", "transfer", *arguments],
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
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


ENDLESS = ["--block-size", "64KiB", "--footprint", "8MiB", "--duration", "20ms", "--warmup", "0", "--rounds", "1000"]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_what_was_measured_is_shown(transport: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    terminal = Terminal("--transport", transport, "--op", "read,write", *ENDLESS, "--json", str(file))
    terminal.wait_for("row 1 of 2")
    terminal.wait_for("round 3 of 1000")
    children = terminal.children()
    assert len(children) == (1 if transport == "tcp" else 0)
    terminal.send(signal.SIGINT)
    status, output = terminal.ended()
    assert status == ExitStatus.INTERRUPTED
    assert f"{transport}" in output
    assert " ok" in output
    result = json.loads(file.read_text())
    assert result["interrupted"]
    (row,) = result["rows"]
    assert row["rounds"] >= 2
    assert row["verified"]
    assert not any(exists(pid) for pid in children), "the target process is still there"


def test_a_long_window_ends_at_once() -> None:
    # An hour in one window: only the interruption can end it before the test's own time is over.
    terminal = Terminal(*ENDLESS, "--duration", "1h", "--transport", "tcp", "--op", "write")
    terminal.wait_for("round 1 of 1000")
    terminal.send(signal.SIGINT)
    status, output = terminal.ended()
    assert (status, output) == (ExitStatus.INTERRUPTED, "")


def test_a_killed_run_takes_its_target_with_it() -> None:
    terminal = Terminal("--transport", "tcp", *ENDLESS)
    terminal.wait_for("round 2 of 1000")
    (target,) = terminal.children()
    watch = os.pidfd_open(target)
    terminal.send(signal.SIGKILL)
    assert terminal.ended()[0] == -signal.SIGKILL
    # A pidfd is readable once its process has ended.
    assert select.select([watch], [], [], 60)[0], "the target process is still there"
    os.close(watch)
