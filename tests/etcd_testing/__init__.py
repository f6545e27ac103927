# SPDX-License-Identifier: Apache-2.0
"""Real etcd members on loopback, which tests kill, stop, restart and set back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from store_testing.certificates import Pair

from moonpool.master.errors import StoreBusyError
from moonpool.master.store import EtcdOptions, Identity, MetadataStore
from moonpool.master.store.packing import split_records

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SECONDS", "Cluster", "Etcd", "put", "read", "record", "slots", "take_turn"]

SECONDS = 60.0
# Shorter than etcd's own, so that elections in tests take less; a lease is granted for 1.5 elections at least.
_ELECTION_MS = 500
_ATTEMPTS = 5


class Etcd:
    """One member.

    Args:
        folder: for its data and its log.
        name: of the member.
        more: arguments for etcd.
        tls: its certificate, for clients.
    """

    def __init__(self, folder: Path, name: str, more: Sequence[str] = (), tls: Pair | None = None) -> None:
        self.folder = folder
        self.data = folder / name
        self.name = name
        self.port, self.peer_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.peer_url = f"http://127.0.0.1:{self.peer_port}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"
        self.more = list(more)
        self.tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, peers: Sequence[Etcd]) -> None:
        """Start it, with what it has on its disk. `await_ready` says when it serves."""
        # It ends with this process, also when that is killed.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "etcd",
            "--name",
            self.name,
            "--data-dir",
            str(self.data),
            "--logger",
            "zap",
        ]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", ",".join(f"{one.name}={one.peer_url}" for one in peers)]
        command += ["--heartbeat-interval", str(_ELECTION_MS // 10), "--election-timeout", str(_ELECTION_MS)]
        if self.tls is not None:
            command += ["--cert-file", self.tls.tls_cert, "--key-file", self.tls.tls_key]
            command += ["--trusted-ca-file", self.tls.tls_ca, "--client-cert-auth"]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            # One core each: several of them share those of the machine.
            environment = os.environ | {"GOMAXPROCS": "1", "ETCD_UNSUPPORTED_ARCH": ""}
            self._process = subprocess.Popen([*command, *self.more], stdout=log, stderr=log, env=environment)

    @property
    def pid(self) -> int | None:
        """Of its process; None: it does not run."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it with -9, whatever it is doing, and wait for that."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait(SECONDS)
            self._process = None

    def leave(self) -> None:
        """Ask it to end, and wait for that."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(SECONDS)
            self._process = None

    def stop(self) -> None:
        """Have it stand still, with its connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """Return what it has said."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")


class Cluster:
    """Members of one etcd.

    Args:
        folder: for what they write.
        members: how many.
        more: arguments for each.
        tls: their certificate, and one for `ctl`.
    """

    def __init__(
        self, folder: Path, members: int = 1, more: Sequence[str] = (), tls: tuple[Pair, Pair] | None = None
    ) -> None:
        if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
            pytest.skip("there is no command etcd: tools/setup-system.sh test installs it")
        self.folder = folder
        self._tls = tls
        self._user = ""
        for attempt in range(_ATTEMPTS):
            self.members = [
                Etcd(folder, f"m{attempt}{number}", more, tls[0] if tls else None) for number in range(members)
            ]
            self.start()
            if self._ready():
                return
            # Somebody took a port meanwhile.
            self.kill()
        raise AssertionError("\n".join(member.log()[-2000:] for member in self.members))

    @property
    def endpoints(self) -> str:
        """The addresses, as a setting names them."""
        return ",".join(member.address for member in self.members)

    def options(self, prefix: str = "moonpool", **more: Any) -> EtcdOptions:
        """Return options of a store in it, with a short lease."""
        parsed = EtcdOptions.parse(f"{self.endpoints}/{prefix}")
        return dataclasses.replace(parsed, **{"lease": 1.0, **more})

    def start(self) -> None:
        """Start every member that does not run."""
        for member in self.members:
            if not member.alive:
                member.start(self.members)

    def await_ready(self) -> None:
        """Wait until every member takes writes."""
        assert self._ready(), "\n".join(member.log()[-2000:] for member in self.members)

    def _ready(self) -> bool:
        end = time.monotonic() + SECONDS
        for member in self.members:
            while not _serves(member):
                if not member.alive or time.monotonic() > end:
                    return False
                time.sleep(0.02)
        # It answers, but without a leader nothing is written.
        while time.monotonic() < end:
            if self.ctl("endpoint", "health", check=False).returncode == 0:
                return True
            time.sleep(0.05)
        return False

    def ctl(self, *arguments: str, check: bool = True, member: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run etcdctl."""
        urls = [one.url for one in self.members] if member is None else [self.members[member].url]
        command = ["etcdctl", "--endpoints", ",".join(urls), *arguments]
        if self._tls is not None:
            own = self._tls[1]
            command += ["--cert", own.tls_cert, "--key", own.tls_key, "--cacert", own.tls_ca]
        if self._user:
            command += ["--user", self._user]
        environment = os.environ | {"ETCDCTL_API": "3"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=check)

    def protect(self, password: str) -> None:
        """Have it ask for a user with this password: root, or ``pool``, who may do what a master's keys need."""
        self.ctl("user", "add", f"pool:{password}")
        self.ctl("role", "add", "pool")
        self.ctl("role", "grant-permission", "pool", "readwrite", "--prefix=true", "/moonpool/moonpool/")
        self.ctl("user", "grant-role", "pool", "pool")
        self.ctl("user", "add", f"root:{password}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("auth", "enable")
        self._user = f"root:{password}"

    def kill(self) -> None:
        """End every member."""
        for member in self.members:
            member.kill()

    def restore(self, snapshot: Path, *more: str) -> None:
        """Set the only member back to a snapshot."""
        (member,) = self.members
        member.kill()
        shutil.rmtree(member.data)
        command = ["etcdctl", "snapshot", "restore", str(snapshot), "--name", member.name, *more]
        command += ["--data-dir", str(member.data), "--initial-cluster", f"{member.name}={member.peer_url}"]
        command += ["--initial-advertise-peer-urls", member.peer_url]
        subprocess.run(command, env=os.environ | {"ETCDCTL_API": "3"}, capture_output=True, timeout=SECONDS, check=True)
        self.start()
        self.await_ready()

    def leader(self) -> Etcd:
        """Return the member that leads now."""
        for number, member in enumerate(self.members):
            status = json.loads(self.ctl("endpoint", "status", "-w", "json", member=number).stdout)[0]["Status"]
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise AssertionError("nobody leads")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _free_port() -> int:
    """Return a port that nobody gets who asks for any: a member that is down for a while has to find its own again."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _serves(member: Etcd) -> bool:
    try:
        socket.create_connection(("127.0.0.1", member.port), 1.0).close()
    except OSError:
        return False
    return True


def slots(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def record(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def put(store: MetadataStore, content: Mapping[int, bytes]) -> Future[None]:
    return store.apply(slots(*content), b"".join(map(record, content.values())), b"")


def read(store: MetadataStore, page: int = 1000) -> dict[int, bytes]:
    """Return the records of a store by their slots."""
    found: dict[int, bytes] = {}
    for numbers, records in store.load(page):
        texts = [text[4:] for text in split_records(records)]
        found.update(zip(memoryview(numbers).cast("I"), texts, strict=True))
    return found


def take_turn(store: MetadataStore) -> Identity:
    """Open a store when nobody leads any more."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return store.open()
        except StoreBusyError:
            assert time.monotonic() < end, "somebody leads on"
        store.wait_for_turn(1.0)
