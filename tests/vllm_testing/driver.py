# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, that is told what to do: a line of JSON for each call and each reply."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vllm_testing.environment import VARIABLES

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineProcess"]


class EngineProcess:
    """An `Engine` in another process. The arguments are those of `Engine`.

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

    def ask(self, *prompts: Iterable[int], tokens: int = 8, salt: str | None = None) -> list[dict[str, Any]]:
        """Run requests to their end, all at the same time, and return the fields of an `Answer` for each."""
        return self._call("ask", prompts=[list(prompt) for prompt in prompts], tokens=tokens, salt=salt)["answers"]

    def forget(self) -> bool:
        """Drop the engine's own prefix cache."""
        return bool(self._call("forget")["done"])

    def settle(self) -> None:
        """Step until every save has ended."""
        self._call("settle")

    def hash_of(self, text: str) -> int:
        """Return Python's hash of a text there."""
        return int(self._call("hash", text=text)["hash"])

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
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
        assert self._process.stdin is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._replies.readline()
        if not line:
            self._process.wait(60)
            self._said.seek(0)
            raise RuntimeError(f"the engine has ended:\n{self._said.read().decode(errors='replace')[-6000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def main() -> None:
    """Make the engine of the arguments, and do what standard input says until it ends."""
    replies = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    arguments = json.loads(sys.argv[2])
    from vllm_testing.engines import Engine

    with Engine(Path(arguments.pop("model")), arguments.pop("connector"), **arguments) as engine:
        for line in sys.stdin:
            call = json.loads(line)
            reply: dict[str, Any] = {}
            if call["what"] == "ask":
                answers = engine.ask(*call["prompts"], tokens=call["tokens"], salt=call["salt"])
                reply = {"answers": [asdict(answer) for answer in answers]}
            elif call["what"] == "forget":
                reply = {"done": engine.forget()}
            elif call["what"] == "settle":
                engine.settle()
            elif call["what"] == "hash":
                reply = {"hash": hash(call["text"])}
            else:
                raise ValueError(call["what"])
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
