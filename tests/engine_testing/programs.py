# SPDX-License-Identifier: Apache-2.0
"""Programs that run in a process of their own, with an engine and a peer ready."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PRELUDE = """
import atexit, gc, os, sys, threading, warnings
# Python 3.12 and later warn of every fork in a process with threads; the engine has some, and is made for it.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
from moonpool.transfer_engine import *
"""


def run(program: str, *options: str, expect: int = 0) -> str:
    """Run `program` and return what it wrote; it must end by itself with status `expect`."""
    done = subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == expect, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


PAIR = """
    server = TransferEngine("server", transports={transport!r})
    client = TransferEngine("client", transports={transport!r}, listen=None)
    region = server.allocate(64 << 20, name="kv")
    peer = client.connect(server.address)
    local = client.allocate(64 << 20)
    remote = peer.regions["kv"]
"""
