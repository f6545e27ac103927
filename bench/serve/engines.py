# SPDX-License-Identifier: Apache-2.0
"""vLLM engines that are started for a run, each in processes of its own, and reached as servers are."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moonpool.bench.errors import BenchError
from moonpool.bench.serve.asking import Place
from moonpool.units import format_duration

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Engines"]

#: For an engine to end in good order, which takes its connector along.
_STOP_S: Final = 20.0
_SHOWN_MAX: Final = 500
#: The last line of a traceback, behind what a logger has written before it.
_EXCEPTION: Final = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+)")


@dataclass
class _Engine:
    process: subprocess.Popen[bytes]
    #: Says when it is there: closed without a byte where it never will be.
    ready: int
    log: Path


class Engines:
    """Engines, their processes and their folder. A context manager.

    Args:
        model: where it is.
        arguments: of all engines, as vLLM names them.
        timeout: seconds until each has to be there.
        show: is told what is done.
    """

    def __init__(self, model: str, arguments: dict[str, Any], timeout: float, show: Callable[[str], None]) -> None:
        self._model = model
        self._arguments = arguments
        self._timeout = timeout
        self._show = show
        self._engines: dict[str, _Engine] = {}

    def __enter__(self) -> Self:
        # Short: a socket has room for about a hundred characters.
        self._folder = tempfile.TemporaryDirectory(prefix="mcb-")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for engine in self._engines.values():
                # Not its own method, which may take note that it has ended: until that is done nobody else has its id.
                os.kill(engine.process.pid, signal.SIGTERM)
            deadline = time.monotonic() + _STOP_S
            for engine in self._engines.values():
                _end(engine, deadline)
        finally:
            self._folder.cleanup()

    def start(self, configs: Mapping[str, dict[str, Any] | None]) -> dict[str, Place]:
        """Start an engine with each kv-transfer-config, one after the other, and wait until they are there.

        Raises:
            BenchError: one is not; with the end of what it said.
        """
        places = {}
        for number, (name, config) in enumerate(configs.items()):
            self._show(f"starting engine {name}")
            socket = f"{self._folder.name}/{number}"
            self._engines[name] = self._begin(number, socket, config)
            self._wait(name, self._engines[name])
            places[name] = Place("http://engine", socket)
        return places

    def _begin(self, number: int, socket: str, config: dict[str, Any] | None) -> _Engine:
        ready, told = os.pipe()
        log = Path(self._folder.name, f"{number}.log")
        task = {"model": self._model, "arguments": self._arguments, "kv_transfer_config": config}
        try:
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", "moonpool.bench.serve.engine_process", socket, str(told), json.dumps(task)],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    pass_fds=[told],
                    # Its processes end with it, and Ctrl-C is for the benchmark alone.
                    start_new_session=True,
                )
        finally:
            os.close(told)
        return _Engine(process, ready, log)

    def _wait(self, name: str, engine: _Engine) -> None:
        try:
            readable, _, _ = select.select([engine.ready], [], [], self._timeout)
            if readable and os.read(engine.ready, 1):
                return
        finally:
            os.close(engine.ready)
        what = "ended" if readable else f"is not there after {format_duration(self._timeout)}"
        # Of the many lines of such an end the first error is mostly the cause, and not always.
        handle, kept = tempfile.mkstemp(prefix="mooncake-bench-engine-", suffix=".log")
        os.close(handle)
        shutil.copyfile(engine.log, kept)
        raise BenchError(f"engine {name} {what}", cause=_first_error(engine.log), hint=f"look into {kept}")


def _first_error(log: Path) -> str:
    """Return the first line that names an exception, or the last one."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()] or ["nothing"]
    named = [match[1] for line in said if (match := _EXCEPTION.search(line))]
    return (named or said[-1:])[0][:_SHOWN_MAX]


def _end(engine: _Engine, deadline: float) -> None:
    """Wait for an engine that was told to end, and end what is left of it."""
    ended = os.pidfd_open(engine.process.pid)
    try:
        select.select([ended], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(ended)
    # All processes of its session, of which one may have outlived the first.
    os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait()
