# SPDX-License-Identifier: Apache-2.0
"""The processes of a pool: members of etcd, masters, nodes with memory and disk, clients that check what they get."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import etcd_testing
from engine_testing.leaks import eventually
from store_testing.workload import LATE

from moonpool.cluster import LocalCluster, environment_without_settings, local_cluster
from pool_chaos.client import TIMEOUTS

if TYPE_CHECKING:
    from typing_extensions import Self

MEMBERS, MASTERS, NODES, CLIENTS = 3, 2, 3, 4
#: Faults at once.
THREADS = 3
DRAM, SSD = 4 << 20, 8 << 20
#: Short, so that what a fault holds up is given up within a run; little room in memory, so that disks are used.
MASTER_OPTIONS = {
    "etcd_lease": "2s",
    "session_timeout": "2s",
    "heartbeat_interval": "200ms",
    "put_begin": "1s",
    "put_deadline": "5s",
    "lease_max": "1s",
    "segment_grace": "10s",
    "quarantine": "1s",
    "high_watermark": "0.6",
    "low_watermark": "0.4",
}
#: A node that is started while no master leads waits for one.
NODE_OPTIONS = {"startup_timeout": "25s"}
#: A client that is asked to end is in the middle of three calls at most, and then closes.
CLIENT_END_SECONDS = 4 * (max(TIMEOUTS) + LATE)


class Reports:
    """What client processes have written, those that are over included.

    Args:
        folder: where.
        name: what the names of their files begin with.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name

    def read(self) -> tuple[Counter[str], list[str]]:
        """Return what all of them have seen, and what must not have been."""
        seen: Counter[str] = Counter()
        wrong = []
        for path in self._folder.glob(f"{self._name}*.json"):
            its, its_wrong = json.loads(path.read_text(encoding="utf-8"))
            seen.update(its)
            wrong += [f"client {path.stem}: {what}" for what in its_wrong]
        return seen, wrong


class Client:
    """A client process, which is killed and replaced by another now and then.

    Args:
        arguments: addresses of masters, and the secret.
        seed: of its calls.
        folder: for what it and those that follow it say.
        without: kinds of calls that it leaves.
    """

    def __init__(self, arguments: Sequence[str], seed: int, folder: Path, without: Sequence[str] = ()) -> None:
        self._arguments = arguments
        self._seed = seed
        self._folder = folder
        self._without = without
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.failures: list[str] = []
        self.start()

    @property
    def pid(self) -> int | None:
        """Of the process that runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, or the next one."""
        self._count += 1
        arguments = [*self._arguments, str(self._seed + self._count), str(self._path("json")), *self._without]
        with self._path("log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pool_chaos.client", *arguments],
                env=environment_without_settings(),
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """As ``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def leave(self) -> None:
        """Ask it to end, and wait for that. Whether it does is noted in `failures`."""
        process = self._process
        if process is None:
            return
        # Before its first report it does not yet listen to signals.
        eventually(lambda: self._path("json").exists() or process.poll() is not None, CLIENT_END_SECONDS)
        process.terminate()
        try:
            status = process.wait(CLIENT_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            self.kill()
            status = -signal.SIGKILL
        self._process = None
        if status:
            log = self._path("log").read_text(errors="replace")
            self.failures.append(f"client {self._seed}-{self._count} ended with status {status}: {log[-4000:]}")

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._seed}-{self._count}.{suffix}"

    def found(self) -> tuple[Counter[str], list[str]]:
        """Return what all of them have seen, and what must not have been."""
        seen, wrong = Reports(self._folder, f"{self._seed}-").read()
        return seen, self.failures + wrong


class Place:
    """Everything of a pool, started when made and ended at the end.

    Args:
        folder: for what its processes write, those of the pool apart.
        seed: of what clients do.
        clients: how many to begin with.
        dram: memory of each node.
        ssd: what each keeps on its disk.
        options: settings of masters, instead of those of `MASTER_OPTIONS`.

    Attributes:
        etcd: its members.
        pool: its masters and nodes.
        clients: the first one is never killed.
        threads: which start and end processes. They end last: a member of etcd ends with the thread that started it.
    """

    def __init__(
        self, folder: Path, seed: int, clients: int = CLIENTS, *, dram: int = DRAM, ssd: int = SSD, **options: str
    ) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        with contextlib.ExitStack() as undo:
            self.threads = undo.enter_context(ThreadPoolExecutor(THREADS))
            self.etcd = undo.enter_context(etcd_testing.Cluster(folder, MEMBERS))
            self.pool: LocalCluster = undo.enter_context(
                local_cluster(
                    nodes=NODES,
                    dram=str(dram),
                    ssd=str(ssd),
                    store=f"etcd:{self.etcd.endpoints}/soak",
                    masters=MASTERS,
                    master_options={**MASTER_OPTIONS, **options},
                    node_options=NODE_OPTIONS,
                )
            )
            self.clients: list[Client] = []
            undo.callback(self._kill_clients)
            self.add_clients(clients)
            self._undo = undo.pop_all()

    def add_clients(self, count: int, *without: str) -> None:
        """Start more of them, which leave some kinds of calls."""
        arguments = [self.pool.master, self.pool.secret]
        for _ in range(count):
            self.clients.append(Client(arguments, 1000 * self._chance.randrange(1_000_000), self._folder, without))

    def pids(self) -> dict[str, int]:
        """Return every process that runs, by what it is."""
        found = dict(self.pool.pids)
        more: dict[str, Sequence[etcd_testing.Etcd | Client]] = {"etcd": self.etcd.members, "client": self.clients}
        for kind, processes in more.items():
            found |= {f"{kind} {number}": one.pid for number, one in enumerate(processes) if one.pid is not None}
        return found

    def heal(self) -> list[str]:
        """Have every process run, whatever was done to it. Return which had ended unasked."""
        gone = [name for name, pid in self.pids().items() if not _goes_on(pid)]
        if gone:
            return [f"{name} had ended, and nobody had asked it to" for name in gone]
        self.etcd.start()
        self.etcd.await_ready()
        running = self.pool.pids
        for index in range(MASTERS):
            if f"master {index}" not in running:
                self.pool.start_master(index)
        for index in range(NODES):
            if f"node {index}" not in running:
                self.pool.start_node(index)
        for client in self.clients:
            if client.pid is None:
                client.start()
        return []

    def close(self) -> None:
        """End every process."""
        self._undo.close()

    def _kill_clients(self) -> None:
        for client in self.clients:
            client.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _goes_on(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True
