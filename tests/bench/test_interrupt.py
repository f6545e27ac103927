# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C shows what was measured, and leaves no process behind."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest
from bench_testing import Terminal, interrupt

from moonpool.bench.errors import BenchError, ExitStatus
from moonpool.bench.perform import Ending

ENDLESS = ["--block-size", "64KiB", "--footprint", "8MiB", "--duration", "20ms", "--warmup", "0", "--rounds", "1000"]


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_what_was_measured_is_shown(transport: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    terminal = Terminal("transfer", "--transport", transport, "--op", "read,write", *ENDLESS, "--json", str(file))
    terminal.wait_for("row 1 of 2")
    output, row = interrupt(terminal, file, children=1 if transport == "tcp" else 0)
    assert f"{transport}" in output
    assert row["verified"]


def test_a_long_window_ends_at_once() -> None:
    # An hour in one window: only the interruption can end it before the test's own time is over.
    terminal = Terminal("transfer", *ENDLESS, "--duration", "1h", "--transport", "tcp", "--op", "write")
    terminal.wait_for("round 1 of 1000")
    terminal.send(signal.SIGINT)
    status, output = terminal.ended()
    assert (status, output) == (ExitStatus.INTERRUPTED, "")


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM])
def test_what_cleaning_up_meets_does_not_hide_it(what: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ending = Ending()
    with ending:
        try:
            signal.raise_signal(what)
        finally:
            raise BenchError("the pool is gone")
    assert signal.getsignal(signal.SIGTERM) == before
    ending.say()
    assert ending.status(verified=True) is ExitStatus.INTERRUPTED
    assert "the pool is gone" in capsys.readouterr().err


def test_a_killed_run_takes_its_target_with_it() -> None:
    terminal = Terminal("transfer", "--transport", "tcp", *ENDLESS)
    terminal.wait_for("round 2 of 1000")
    (target,) = terminal.children()
    watch = os.pidfd_open(target)
    terminal.send(signal.SIGKILL)
    assert terminal.ended()[0] == -signal.SIGKILL
    # A pidfd is readable once its process has ended.
    assert select.select([watch], [], [], 60)[0], "the target process is still there"
    os.close(watch)
