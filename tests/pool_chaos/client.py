# SPDX-License-Identifier: Apache-2.0
"""A client in a process of its own: ``python -m pool_chaos.client MASTERS SECRET SEED FILE [WITHOUT...]``.

It makes random calls until SIGTERM, and writes what came of them to the file all the time. SIGUSR1 has every thread
say on standard error where it is.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import threading
import time
from pathlib import Path

from store_testing.workload import Workload

#: Seconds that the calls of a client have: fewer than a fail-over takes, and more.
TIMEOUTS = (3.0, 20.0)
_TICK = 0.05


class AwakeClock:
    """Seconds during which this process was not stopped, as near as a thread that looks at the time can tell."""

    def __init__(self) -> None:
        self._awake = 0.0
        self._looked = time.monotonic()
        threading.Thread(target=self._run, name="clock", daemon=True).start()

    def __call__(self) -> float:
        return self._awake

    def _run(self) -> None:
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            # On a busy machine it comes late; only what is longer than that was a stop.
            self._awake += min(now - self._looked, 10 * _TICK)
            self._looked = now


def main() -> None:
    masters, secret, seed, path, *without = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    over, told = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    work = Workload(masters, secret, int(seed), TIMEOUTS, AwakeClock(), without)
    report = Path(path)

    def tell() -> None:
        # Whole or not at all, since this process may be killed at any moment.
        fresh = report.with_suffix(".new")
        fresh.write_text(json.dumps([dict(work.seen), work.wrong]), encoding="utf-8")
        fresh.replace(report)

    def keep_telling() -> None:
        while not told.wait(0.2):
            tell()

    teller = threading.Thread(target=keep_telling, name="teller")
    teller.start()
    try:
        work.run(over)
    finally:
        told.set()
        teller.join()
        tell()


if __name__ == "__main__":
    main()
