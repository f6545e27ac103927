# SPDX-License-Identifier: Apache-2.0
"""Engines in other processes: started, asked, stopped and killed."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine_testing.leaks import eventually

if TYPE_CHECKING:
    from typing_extensions import Self

_TESTS = str(Path(__file__).parents[1])


class Program:
    """A Python module that obeys (`engine_testing.obeying`), in a process of its own.

    Every call is answered or fails within `timeout` seconds.

    Args:
        module: its name; it gets `setup` as JSON.
        before: a command that starts it, such as unshare(1).
    """

    def __init__(
        self, module: str, setup: dict[str, Any], *, before: Sequence[str] = (), timeout: float = 100.0
    ) -> None:
        self._timeout = timeout
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", module, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([_TESTS, os.environ.get("PYTHONPATH", "")])},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        ready = self._read()
        self.address: str = ready["address"]
        self.incarnation: str = ready["incarnation"]
        self.pid = self._process.pid

    def ask(self, command: str, **arguments: Any) -> Any:
        """Run one of its commands there, and return the answer."""
        self._stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._stdin.flush()
        return self._read()

    def pause(self) -> None:
        """Stop the process as a whole; its sockets stay open and silent. Returns when the last thread has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: self._thread_states() == {"T"})

    def _thread_states(self) -> set[str]:
        # The state follows the name, which stands in brackets and may hold anything.
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{self.pid}/task").iterdir()]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without any farewell."""
        self._process.kill()
        self._process.wait(self._timeout)

    def close(self) -> int:
        """End it in an orderly way if it is still there, and return its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._stdin.close()
            try:
                self._process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        if not self._stdin.closed:
            self._stdin.close()
        self._stdout.close()
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = self.close()
        if kind is None:
            assert status in (0, -signal.SIGKILL), f"the process ended with status {status}"

    def _read(self) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if not selector.select(self._timeout):
                self.kill()
                raise TimeoutError("the process did not answer")
        line = self._stdout.readline()
        if not line:
            raise ConnectionError(f"the process ended with status {self._process.wait(self._timeout)}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "failure" in answer:
            raise RuntimeError(f"in the process: {answer['failure']}")
        return answer


class Target(Program):
    """An engine in another process, with the commands of `engine_testing.target`.

    Args:
        regions: name -> length of the regions it allocates, filled with `pattern`.
        place: where it runs (`engine_testing.places`), when that is not beside the test.
        options: keyword arguments of its `TransferEngine`.
    """

    def __init__(
        self,
        regions: dict[str, int] | None = None,
        *,
        place: dict[str, Any] | None = None,
        before: Sequence[str] = (),
        timeout: float = 100.0,
        **options: Any,
    ) -> None:
        setup = {"regions": regions or {}, "options": options, "place": place or {}}
        super().__init__("engine_testing.target", setup, before=before, timeout=timeout)

    def add(self, name: str, nbytes: int, kind: str) -> None:
        """Make a region of memory that the engine allocated (`mapped` over shm) or only registered (`copied`)."""
        if kind == "mapped":
            self.ask("allocate", name=name, nbytes=nbytes)
        else:
            self.ask("register", name=name, nbytes=nbytes, writable=True)
