# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, that is told what to do: a line of JSON for each call and each reply."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vllm_testing.environment import VARIABLES

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm_testing.engines import Engine

__all__ = ["EngineEndedError", "EngineProcess"]

#: What vLLM takes to end, on a busy machine.
_CLOSE_SECONDS = 180.0
_WRITE_SECONDS = 5.0


class EngineEndedError(RuntimeError):
    """The process has ended, and gives no reply."""


class EngineProcess:
    """An `Engine` in another process, which runs while it has something to do. The arguments are those of `Engine`.

    Args:
        environment: variables to set there.
    """

    def __init__(
        self,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if connector is not None:
            # A secret is bytes in settings, and text in JSON.
            connector = json.loads(json.dumps(connector, default=bytes.decode))
        reading, writing = os.pipe()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        arguments = json.dumps({"model": str(model), "connector": connector, **options})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_testing.driver", str(writing), arguments],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            pass_fds=(writing,),
            env={
                **os.environ,
                **VARIABLES,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **(environment or {}),
            },
            text=True,
        )
        os.close(writing)
        self._replies = os.fdopen(reading, encoding="utf-8")
        self._ready = False

    @property
    def log(self) -> str:
        """What it has written to its standard output and error."""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), size, 0).decode(errors="replace")

    def ask(
        self,
        *prompts: Iterable[int],
        tokens: int = 8,
        salt: str | None = None,
        params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[dict[str, Any]]:
        """Run requests to their end, all at the same time, and return the fields of an `Answer` for each."""
        self.begin_ask(*prompts, tokens=tokens, salt=salt, params=params)
        return self.answers()

    def begin_ask(
        self,
        *prompts: Iterable[int],
        tokens: int = 8,
        salt: str | None = None,
        params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Begin what `answers` returns. Nothing else is called meanwhile."""
        self._send("ask", prompts=[list(prompt) for prompt in prompts], tokens=tokens, salt=salt, params=params)

    def answers(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return what came of requests that were begun.

        Args:
            timeout: seconds, from when the engine is there.

        Raises:
            EngineEndedError: the engine has ended, or was killed.
            TimeoutError: nothing came in time.
        """
        self._wait_until_ready()
        if timeout is not None and not select.select([self._replies], [], [], timeout)[0]:
            # It writes where each of its threads is.
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_WRITE_SECONDS)
            raise TimeoutError(f"no answer in {timeout} seconds:\n{self.log[-12000:]}")
        answers: list[dict[str, Any]] = self._reply()["answers"]
        return answers

    def forget(self) -> bool:
        """Drop the engine's own prefix cache."""
        return bool(self._call("forget")["done"])

    def settle(self) -> None:
        """Step until every save has ended."""
        self._call("settle")

    def free_blocks(self) -> int:
        """Return how many blocks of its cache nobody holds."""
        return int(self._call("free")["blocks"])

    def counts(self) -> dict[str, Any]:
        """Return what its connector has counted since the last time."""
        counts: dict[str, Any] = self._call("counts")["counts"]
        return counts

    def hash_of(self, text: str) -> int:
        """Return Python's hash of a text there."""
        return int(self._call("hash", text=text)["hash"])

    def stop(self) -> None:
        """Stop the process where it is."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a host does that loses its power. Again: nothing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._replies.close()
            self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, what: str, **arguments: Any) -> dict[str, Any]:
        self._send(what, **arguments)
        return self._reply()

    def _send(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self._process.stdin.flush()

    def _wait_until_ready(self) -> None:
        # To import vLLM takes long, and on a busy machine far longer than any answer.
        if not self._ready:
            self._read()
            self._ready = True

    def _reply(self) -> dict[str, Any]:
        self._wait_until_ready()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            self._process.wait(60)
            raise EngineEndedError(f"the engine has ended:\n{self.log[-6000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _calls(engine: Engine) -> Iterator[dict[str, Any]]:
    """Yield what standard input says until it ends. Meanwhile the engine runs while it has something to do."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, name="calls", daemon=True).start()
    while True:
        try:
            line = lines.get(block=not engine.has_work)
        except queue.Empty:
            engine.step()
            continue
        if not line:
            return
        yield json.loads(line)


def main() -> None:
    """Make the engine of the arguments, and do what standard input says until it ends."""
    faulthandler.register(signal.SIGUSR1)
    replies = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    arguments = json.loads(sys.argv[2])
    from vllm_testing.engines import Engine

    with Engine(Path(arguments.pop("model")), arguments.pop("connector"), **arguments) as engine:
        reply: dict[str, Any] = {}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        for call in _calls(engine):
            reply = {}
            if call["what"] == "ask":
                options = {name: call[name] for name in ("tokens", "salt", "params")}
                reply = {"answers": [asdict(answer) for answer in engine.ask(*call["prompts"], **options)]}
            elif call["what"] == "forget":
                reply = {"done": engine.forget()}
            elif call["what"] == "settle":
                engine.settle()
            elif call["what"] == "free":
                reply = {"blocks": engine.free_blocks}
            elif call["what"] == "counts":
                reply = {"counts": engine.counts()}
            elif call["what"] == "hash":
                reply = {"hash": hash(call["text"])}
            else:
                raise ValueError(call["what"])
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
