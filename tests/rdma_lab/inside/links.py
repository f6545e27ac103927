# SPDX-License-Identifier: Apache-2.0
"""The network under the devices: device `rxea0` is on the link `a0`, and what a0 sends, a1 gets; likewise b0 and b1."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

LINKS = ("a0", "a1", "b0", "b1")
DEVICES = tuple(f"rxe{link}" for link in LINKS)
# An Ethernet frame of this size carries 4096 bytes of RDMA payload.
MTU = 4200
LIMIT = 20.0


def run(*command: str, limit: float = LIMIT) -> str:
    """Return what a command printed; fails with it if the command does."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def wait_until(true: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, f"not within {limit:g} s: {what}"
        time.sleep(0.02)


def state(device: str) -> str:
    """Return "ACTIVE" or "DOWN"; the kernel's own view."""
    return _port(device, "state")


def physical_state(device: str) -> str:
    """Return "LinkUp", "Polling" (the other end is down) or "Disabled"."""
    return _port(device, "phys_state")


def _port(device: str, name: str) -> str:
    return Path(f"/sys/class/infiniband/{device}/ports/1/{name}").read_text().split(": ")[1].strip()


class Links:
    """Changes the network, and undoes all of it at the end."""

    def down(self, link: str) -> None:
        run("ip", "link", "set", link, "down")

    def up(self, link: str) -> None:
        run("ip", "link", "set", link, "up")

    def mtu(self, link: str, size: int) -> None:
        run("ip", "link", "set", link, "mtu", str(size))

    def netem(self, link: str, *words: str) -> None:
        """Spoil what a link sends, for example with ("loss", "1%") or ("delay", "20ms")."""
        run("tc", "qdisc", "replace", "dev", link, "root", "netem", *words)

    def restore(self) -> None:
        for link in LINKS:
            self.up(link)
            self.mtu(link, MTU)
            if "netem" in run("tc", "qdisc", "show", "dev", link):
                run("tc", "qdisc", "del", "dev", link, "root")
        self.wait_active()

    def wait_active(self) -> None:
        wait_until(lambda: {state(device) for device in DEVICES} == {"ACTIVE"}, "all devices ACTIVE")
