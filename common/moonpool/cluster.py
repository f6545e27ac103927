# SPDX-License-Identifier: Apache-2.0
"""A pool on this host for notebooks and tests: a master and nodes as processes of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from moonpool.errors import MoonpoolError

if TYPE_CHECKING:
    from moonpool.store_client import StoreClient

__all__ = [
    "OPEN",
    "READY",
    "TIED",
    "ClusterError",
    "LocalCluster",
    "TiedProcess",
    "environment_without_settings",
    "local_cluster",
    "tied_command",
]

#: Stand for descriptors in the arguments of a `TiedProcess`.
TIED: Final = "{tied}"
READY: Final = "{ready}"

#: Settings by which a client fits a pool without secret and TLS, whatever the environment and its file say.
OPEN: Final[Mapping[str, Any]] = dict.fromkeys(("secret", "tls_cert", "tls_key", "tls_ca", "tls_name"))

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_STDERR_SHOWN: Final = 4000
# A port that was free a moment ago may be taken by somebody else before a master that was killed is there again.
_RESTART_SECONDS: Final = 30.0


class ClusterError(MoonpoolError, RuntimeError):
    """A process of a local cluster did not start, or has ended by itself; the cause is what it wrote last."""

    default_code = "CLUSTER"


class TiedProcess:
    """A process of Python that ends with this one, and writes a line when it is ready. Started when made.

    Args:
        what: for people.
        arguments: of Python. `TIED` and `READY` stand for descriptors: the reading end of a pipe that is open for as
            long as this process, and where the line goes.
        environment: all of its variables.
    """

    def __init__(self, what: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.what = what
        # Without a name, so that nothing is left behind when this process is killed.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept as long as the process
        tied, self._tie = os.pipe()
        ready, done = os.pipe()
        try:
            self.popen = subprocess.Popen(
                [sys.executable, *({TIED: str(tied), READY: str(done)}.get(part, part) for part in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(tied, done),
                env=dict(environment),
                # Ctrl-C in a terminal or a notebook is for the program there, which decides what becomes of its pool.
                start_new_session=True,
            )
        except BaseException:
            os.close(ready)
            self._close_own()
            raise
        finally:
            os.close(tied)
            os.close(done)
        self._ready = ready

    def wait_ready(self, deadline: float) -> str:
        """Return the line that it wrote when it was ready.

        Raises:
            ClusterError: it ended, or was not ready in time.

        Whatever is raised, also by Ctrl-C: the process has ended then.
        """
        line = b""
        try:
            while not line.endswith(b"\n"):
                readable, _, _ = select.select([self._ready], [], [], max(0.0, deadline - time.monotonic()))
                part = os.read(self._ready, 4096) if readable else b""
                if not part:
                    how = "did not start" if readable else "was not ready in time"
                    self._stop()
                    raise ClusterError(f"the {self.what} {how}", cause=self.said())
                line += part
        except BaseException:
            self.end()
            raise
        return line.decode().strip()

    def said(self) -> str:
        """Return the end of what it wrote to its standard error."""
        # The process shares the position in the file, so it is left where it is.
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _STDERR_SHOWN, max(0, size - _STDERR_SHOWN))
        return text.decode(errors="replace").strip()

    def kill(self) -> None:
        """As ``kill -9``, and reap it."""
        self.popen.kill()
        self.popen.wait()
        self._close_own()

    def end(self) -> None:
        """Ask it to end, then make it, and reap it."""
        self._stop()
        self._close_own()

    def _stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()

    def _close_own(self) -> None:
        for name in ("_tie", "_ready"):
            fd = getattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)
        self._log.close()


def tied_command(*arguments: str) -> list[str]:
    """Return the arguments of Python for a `moonpool` command as a `TiedProcess`."""
    return ["-m", "moonpool._tied", TIED, *arguments, "--ready-fd", READY]


def environment_without_settings() -> dict[str, str]:
    """Return the variables of this process but Moonpool's, and where modules are found."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment


class LocalCluster:
    """A master and nodes on this host, made by `local_cluster`.

    Attributes:
        secret: the secret of this cluster.
    """

    def __init__(
        self,
        *,
        dram: str,
        store: str,
        masters: int,
        master_options: Mapping[str, str],
        node_options: Mapping[str, str],
        ssd: str | None = None,
    ) -> None:
        self.secret = secrets.token_hex(16)
        self._dram = dram
        self._folder = tempfile.TemporaryDirectory(prefix="moonpool-") if store == "sqlite" or ssd else None
        self._store = f"sqlite:{self._folder.name}/master.db" if self._folder and store == "sqlite" else store
        self._ssd = ssd
        self._master_options = master_options
        self._node_options = node_options
        self._masters: list[TiedProcess | None] = [None] * masters
        self._addresses = [""] * masters
        self._nodes: list[TiedProcess | None] = []
        self._clients: list[Any] = []

    @property
    def master(self) -> str:
        """The address of the master, or of all of them with commas between."""
        return ",".join(self._addresses)

    @property
    def client_options(self) -> dict[str, Any]:
        """Settings by which a client fits this cluster, whatever the environment and its file say.

        The secret, the TLS files of `master_options` and the `tls_name` of `node_options`, as far as there are any.
        """
        given = {name: value for name, value in self._master_options.items() if name in OPEN}
        return {**OPEN, "secret": self.secret, "tls_name": self._node_options.get("tls_name"), **given}

    @property
    def pids(self) -> dict[str, int]:
        """The processes that have been started and not ended, as ``"master 0"`` and ``"node 2"``."""
        kinds = {"master": self._masters, "node": self._nodes}
        return {
            f"{kind} {index}": process.popen.pid
            for kind, processes in kinds.items()
            for index, process in enumerate(processes)
            if process is not None
        }

    def slab(self, index: int) -> Path:
        """Return the file that a node keeps chunks in, of a cluster with `ssd`."""
        assert self._folder is not None
        return Path(self._folder.name) / f"node-{index}.slab"

    def client(self, **options: Any) -> StoreClient:
        """Return a new client of this cluster; it is closed with the cluster, if not before.

        Args:
            options: settings of a `StoreClient`; those that are not given are `client_options`, and then what the
                environment says.
        """
        from moonpool.store_client import StoreClient

        client = StoreClient(self.master, **{**self.client_options, **options})
        self._clients.append(client)
        return client

    def start_master(self, index: int = 0) -> None:
        """Start a master, where it was before if it was."""
        address = self._addresses[index]
        deadline = time.monotonic() + (_RESTART_SECONDS if address else _START_SECONDS)
        while True:
            # Known before it is ready, so that `close` finds it whatever comes in between.
            process = self._masters[index] = TiedProcess(
                "master" if len(self._masters) == 1 else f"master {index}",
                tied_command("master", "--listen", address or "127.0.0.1:0", "--store", self._store),
                self._environment("MASTER", {"http": "none", **self._master_options}),
            )
            try:
                line = process.wait_ready(deadline)
            except ClusterError:
                self._masters[index] = None
                if not address or time.monotonic() > deadline - 1.0:
                    raise
                continue
            self._addresses[index] = line.split()[-1]
            return

    def start_masters(self) -> None:
        """Start every master, one after the other: the first one leads."""
        for index in range(len(self._masters)):
            self.start_master(index)

    def kill_master(self, index: int = 0) -> None:
        """As ``kill -9``."""
        process = self._masters[index]
        if process is not None:
            process.kill()
            self._masters[index] = None

    def stop_master(self, index: int = 0) -> None:
        """Ask a master to end, and wait for it."""
        process = self._masters[index]
        if process is not None:
            process.end()
            self._masters[index] = None

    def restart_master(self, index: int = 0) -> None:
        """As ``kill -9`` and a new start at the same address."""
        self.kill_master(index)
        self.start_master(index)

    def signal_master(self, index: int, number: int) -> None:
        """Send a signal, such as SIGSTOP and SIGCONT."""
        process = self._masters[index]
        if process is not None:
            process.popen.send_signal(number)

    def start_node(self, index: int | None = None) -> int:
        """Start one more node, or one that was killed. Returns its index."""
        if index is None:
            self._nodes.append(None)
            index = len(self._nodes) - 1
        self._begin_node(index).wait_ready(time.monotonic() + _START_SECONDS)
        return index

    def start_nodes(self, count: int) -> None:
        """Start nodes, all at the same time."""
        first = len(self._nodes)
        self._nodes += [None] * count
        deadline = time.monotonic() + _START_SECONDS
        for process in [self._begin_node(index) for index in range(first, first + count)]:
            process.wait_ready(deadline)

    def kill_node(self, index: int) -> None:
        """As ``kill -9``."""
        process = self._nodes[index]
        if process is not None:
            process.kill()
            self._nodes[index] = None

    def stop_node(self, index: int) -> None:
        """Ask a node to end, and wait for it."""
        process = self._nodes[index]
        if process is not None:
            process.end()
            self._nodes[index] = None

    def signal_node(self, index: int, number: int) -> None:
        """Send a signal, such as SIGSTOP and SIGCONT."""
        process = self._nodes[index]
        if process is not None:
            process.popen.send_signal(number)

    def close(self) -> None:
        """End clients, nodes and master, and reap the processes."""
        for client in self._clients:
            client.close()
        for index in range(len(self._nodes)):
            self.signal_node(index, signal.SIGCONT)
            self.signal_node(index, signal.SIGTERM)
        for index in range(len(self._nodes)):
            self.stop_node(index)
        for index in range(len(self._masters)):
            self.signal_master(index, signal.SIGCONT)
            self.stop_master(index)
        if self._folder is not None:
            self._folder.cleanup()

    def _begin_node(self, index: int) -> TiedProcess:
        disk = {"ssd": f"{self.slab(index)}:{self._ssd}"} if self._ssd else {}
        process = self._nodes[index] = TiedProcess(
            f"node {index}",
            tied_command("node", "--master", self.master, "--dram", self._dram),
            # Each stands for a host of its own, so that replicas go to different ones.
            self._environment(
                "NODE", {"name": f"node-{index}", "host_id": f"host-{index}", **disk, **self._node_options}
            ),
        )
        return process

    def _environment(self, component: str, options: Mapping[str, str]) -> dict[str, str]:
        environment = environment_without_settings()
        for name, value in {"secret": self.secret, **options}.items():
            environment[f"MOONPOOL_{component}_{name.upper()}"] = str(value)
        return environment


@contextlib.contextmanager
def local_cluster(
    nodes: int = 2,
    dram: str = "256MiB",
    store: str = "memory",
    *,
    masters: int = 1,
    ssd: str | None = None,
    master_options: Mapping[str, str] | None = None,
    node_options: Mapping[str, str] | None = None,
) -> Iterator[LocalCluster]:
    """Start masters and nodes on random ports of the loopback interface, and end them at the end.

    ::

        with moonpool.local_cluster(nodes=2) as cluster:
            client = cluster.client()

    Args:
        nodes: how many.
        dram: memory that each lends.
        store: ``"memory"``, ``"sqlite"`` (in a folder that goes with the cluster), ``"sqlite:PATH"`` or
            ``"etcd:HOST:PORT/PREFIX"``.
        masters: how many; more than one need a store that they share, such as etcd.
        ssd: what each node keeps on a disk below its memory, such as ``"1GiB"``, in files that go with the cluster.
        master_options: settings of the masters by name, such as ``{"put_deadline": "1s"}``.
        node_options: settings of the nodes by name.

    Raises:
        ClusterError: a process did not start; the cause is what it wrote.

    The processes end with this one, also when it is killed.
    """
    cluster = LocalCluster(
        dram=dram,
        store=store,
        masters=masters,
        ssd=ssd,
        master_options=master_options or {},
        node_options=node_options or {},
    )
    try:
        cluster.start_masters()
        cluster.start_nodes(nodes)
        yield cluster
    finally:
        cluster.close()
