# SPDX-License-Identifier: Apache-2.0
"""``python -m rdma_lab [COMMAND...]``: a shell in the emulated machine, or one command and its exit status."""

from __future__ import annotations

import argparse
import shlex
import sys

from rdma_lab import image
from rdma_lab.machine import MachineError, boot, shell

# The command's status goes out through the only port there is.
_JOB = """
status=0
{command} || status=$?
echo "{{\\"status\\": $status}}" >"/dev/$(ls /sys/class/virtio-ports)"
"""


def run(words: list[str], limit: float) -> int:
    job = _JOB.format(command=shlex.join(words))
    with boot(job, limit=limit, show=sys.stdout.buffer.write) as machine:
        status: int = machine.receive(limit)["status"]
        machine.drain()
        return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="rdma_lab", description="An emulated machine with four RDMA devices.")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that the command may take (600)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run there; nothing for a shell")
    given = parser.parse_args()
    if reason := image.missing():
        sys.exit(f"rdma_lab: {reason}")
    try:
        return run(given.command, given.limit) if given.command else shell()
    except image.ImageError as error:
        sys.exit(f"rdma_lab: {error}")
    except MachineError as error:
        sys.exit(f"rdma_lab: {str(error).partition(' Its console')[0]}")  # which was shown as it came


if __name__ == "__main__":
    sys.exit(main())
