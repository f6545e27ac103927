# SPDX-License-Identifier: Apache-2.0
"""The other process of the check, and how the first one asks it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any, Final

import numpy as np

from moonpool.bench.gpu.driver import Driver, DriverError
from moonpool.transfer_engine import TransferEngine

__all__ = ["DEADLINE_S", "Other", "content", "digest", "serve"]

#: For one transfer, and for filling and looking at memory.
DEADLINE_S: Final = 60.0


def content(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    """Return bytes that follow from a number."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def digest(memory: np.ndarray[Any, Any]) -> str:
    """Return what tells two memories apart."""
    return hashlib.blake2b(memory.tobytes(), digest_size=16).hexdigest()


def serve(device: int, nbytes: int) -> None:
    """Be the other process: memory of both kinds, and answers about it on standard output."""
    driver = Driver(device)
    with driver.memory(nbytes) as address, TransferEngine("gpu-check peer", listen="127.0.0.1:0") as engine:
        host = np.zeros(nbytes, np.uint8)
        engine.register((address, nbytes, f"cuda:{device}"), name="gpu")
        engine.register(host, name="host")
        answer({"address": engine.address})
        for line in sys.stdin:
            asked = json.loads(line)
            if "seed" in asked:
                host[:] = content(nbytes, asked["seed"])
                driver.put(address, host)
                answer({})
            else:
                answer({"digest": digest(host if asked["of"] == "host" else driver.get(address, nbytes))})
    driver.close()


def answer(value: dict[str, Any]) -> None:
    """Write a line to the first process."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Other:
    """The other process, as the first one sees it."""

    def __init__(self, device: int, nbytes: int) -> None:
        command = [
            sys.executable,
            "-m",
            "moonpool.bench.gpu.command",
            "--serve",
            "--device",
            str(device),
            "--nbytes",
            str(nbytes),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: str = self._read()["address"]

    def ask(self, **what: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DriverError(f"the other process ended with status {self._process.wait(DEADLINE_S)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
