# SPDX-License-Identifier: Apache-2.0
"""Mooncake's master, and the process that lends memory to its store."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

from moonpool.bench.backends.installed import imported
from moonpool.bench.errors import BenchError
from moonpool.cluster import TiedProcess

__all__ = ["HOST", "MooncakeServers"]

HOST: Final = "127.0.0.1"
_START_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.02
#: A port that was free a moment ago may be taken by somebody else.
_TRIES: Final = 3
#: Threads of its master and, at least, of the process that lends: of 2, 4 and 16, and of 2 and 8, these are fastest.
_MASTER_THREADS: Final = 4
_CLIENT_THREADS: Final = 8


class _Server(TiedProcess):
    """One of the programs of the wheel, which serves when its port can be reached."""

    def __init__(self, program: Path, *arguments: str) -> None:
        launch = ["-m", "moonpool.bench.pool.peers.launch", str(os.getpid()), str(program), *arguments]
        super().__init__(program.name, launch, dict(os.environ))

    def wait_port(self, port: int) -> None:
        """Return when the port can be reached.

        Raises:
            BenchError: the program has ended, or did not serve in time; the cause is what it wrote.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{self.what} did not start", cause=self.said())
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
                return
            time.sleep(_LOOK_SECONDS)


class MooncakeServers:
    """A master in memory and one process that lends memory, on ports of the loopback interface.

    Args:
        dram: bytes that are lent.
        calls: most calls that are under way at a time: so many threads, or more, answer clients without an engine.

    Attributes:
        master: address of the master.
        client: address where clients without an engine of their own are served.

    Raises:
        BenchError: they are not installed, or did not start.
    """

    def __init__(self, dram: int, calls: int) -> None:
        module: Any = imported("mooncake", "mooncake")
        self._folder = Path(module.__path__[0])
        self._servers: list[_Server] = []
        left = _TRIES
        while not self._servers:
            left -= 1
            self._try(dram, calls, last=left == 0)

    def _try(self, dram: int, calls: int, *, last: bool) -> None:
        try:
            self._start(dram, calls)
        except BenchError:
            self.close()
            if last:
                raise
        except BaseException:
            self.close()
            raise

    def _start(self, dram: int, calls: int) -> None:
        port, metrics_port, client_port = _free_ports(3)
        self.master, self.client = f"{HOST}:{port}", f"{HOST}:{client_port}"
        self._serve(
            "mooncake_master", port, f"--rpc_address={HOST}", f"--rpc_port={port}", f"--metrics_host={HOST}",
            f"--metrics_port={metrics_port}", "--enable_metric_reporting=false", f"--rpc_thread_num={_MASTER_THREADS}",
        )  # fmt: skip
        self._serve(
            "mooncake_client", client_port, f"--host={HOST}", f"--port={client_port}", "--protocol=tcp",
            f"--master_server_address={self.master}", "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={dram}", f"--threads={max(_CLIENT_THREADS, calls)}",
        )  # fmt: skip

    def _serve(self, program: str, port: int, *arguments: str) -> None:
        server = _Server(self._folder / program, *arguments)
        self._servers.append(server)
        server.wait_port(port)

    def said(self) -> str:
        """Return the last words of both."""
        return "; ".join(f"{server.what}: {said}" for server in self._servers if (said := server.said()))

    def close(self) -> None:
        """End both."""
        for server in reversed(self._servers):
            server.end()
        self._servers.clear()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now: all are held until the last is known, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
