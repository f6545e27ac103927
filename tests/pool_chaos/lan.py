# SPDX-License-Identifier: Apache-2.0
"""Hosts with networks of their own between them, made of network namespaces, which can be cut off from each network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from moonpool.cluster import environment_without_settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Host", "Lans"]

_SECONDS = 60.0


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=_SECONDS)


def _must(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Host:
    """A network namespace with a leg in one or more networks. Made by `Lans`."""

    def __init__(self, hub: str, name: str, number: int, lans: Sequence[str]) -> None:
        self._hub = hub
        self.name = name
        self._processes: list[subprocess.Popen[str]] = []
        #: By network.
        self.addresses: dict[str, str] = {}
        self._ports: dict[str, str] = {}
        _must("netns", "add", name)
        _must("-n", name, "link", "set", "lo", "up")
        for index, lan in enumerate(lans):
            port, address = f"{lan}-{number}", f"10.77.{ord(lan[0]) - ord('a')}.{number + 1}"
            _must("-n", hub, "link", "add", "name", port, "type", "veth", "peer", "name", f"leg{index}", "netns", name)
            _must("-n", hub, "link", "set", "dev", port, "master", lan, "up")
            _must("-n", name, "addr", "add", f"{address}/24", "dev", f"leg{index}")
            _must("-n", name, "link", "set", "dev", f"leg{index}", "up")
            self.addresses[lan], self._ports[lan] = address, port

    def cut(self, lan: str) -> None:
        """Have nothing get through between it and this network, nor be told so."""
        _must("-n", self._hub, "link", "set", "dev", self._ports[lan], "down")

    def join(self, lan: str) -> None:
        """End that."""
        _must("-n", self._hub, "link", "set", "dev", self._ports[lan], "up")

    def start(self, command: Sequence[str], log: IO[str] | int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Start a process there, which writes to a log, or to a pipe; it ends with the host, or with this process."""
        whole = ["ip", "netns", "exec", self.name, "setpriv", "--pdeathsig", "KILL", *command]
        process = subprocess.Popen(whole, env=environment_without_settings(), stdout=log, stderr=log, text=True)
        self._processes.append(process)
        return process

    def start_moonpool(self, *arguments: str, folder: Path, **options: str) -> str:
        """Start a `moonpool` command there, and return the line that it says when it is ready."""
        given = [f"MOONPOOL_{arguments[0].upper()}_{name.upper()}={value}" for name, value in options.items()]
        command = ["env", *given, sys.executable, "-m", "moonpool.cli", *arguments]
        ready = folder / f"{self.name}-{arguments[0]}"
        with ready.open("w", encoding="utf-8") as log:
            process = self.start(command, log)
        for _ in range(int(_SECONDS * 20)):
            found = [line for line in ready.read_text(encoding="utf-8").splitlines() if line.startswith("moonpool ")]
            if found:
                return found[0]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                break
        raise AssertionError(f"{command} did not start: {ready.read_text(encoding='utf-8')}")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        whole = ["ip", "netns", "exec", self.name, *command]
        return subprocess.run(whole, capture_output=True, text=True, check=False, timeout=_SECONDS)

    def close(self) -> None:
        """End its processes, and remove it."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.communicate()
        _ip("netns", "del", self.name)


class Lans:
    """Networks and hosts. Skips the test where they cannot be made.

    Args:
        lans: names of the networks, each of one letter.
    """

    def __init__(self, *lans: str) -> None:
        self._name = f"moonpool-{os.getpid()}"
        self._hosts: list[Host] = []
        if shutil.which("ip") is None:
            pytest.skip("there is no command ip")
        if os.geteuid() != 0:
            pytest.skip("only root makes network namespaces")
        made = _ip("netns", "add", self._name)
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        for lan in lans:
            made = _ip("-n", self._name, "link", "add", "name", lan, "type", "bridge")
            if made.returncode:
                self.close()
                pytest.skip(f"no bridge can be made here: {made.stderr.strip()}")
            _must("-n", self._name, "link", "set", "dev", lan, "up")

    def host(self, *lans: str) -> Host:
        """Make a host with a leg in each of these networks."""
        number = len(self._hosts)
        self._hosts.append(Host(self._name, f"{self._name}-{number}", number, lans))
        return self._hosts[-1]

    def close(self) -> None:
        """End everything."""
        for host in self._hosts:
            host.close()
        _ip("netns", "del", self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
