# SPDX-License-Identifier: Apache-2.0
"""Asks one master again and again: ``python -m pool_chaos.asking ADDRESS SECRET FILE``.

It adds a line for each answer: when it was asked and when it answered (seconds of the clock that all processes of a
machine share), and the name of the error or OK.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from master_testing import call, stub

from moonpool.errors import MoonpoolError
from moonpool.proto import pool_pb2 as pb


def main() -> None:
    address, secret, path = sys.argv[1:]
    channel, pool = stub(address, secret.encode())
    with channel, Path(path).open("a", buffering=1, encoding="utf-8") as file:
        while True:
            asked = time.monotonic()
            try:
                call(pool.Exists, pb.ExistsRequest(namespace="ns", hashes=bytes(32)), timeout=1.0)
                said = "OK"
            except MoonpoolError as error:
                said = type(error).__name__
            file.write(f"{asked} {time.monotonic()} {said}\n")
            time.sleep(0.02)


if __name__ == "__main__":
    main()
