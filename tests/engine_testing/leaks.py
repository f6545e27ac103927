# SPDX-License-Identifier: Apache-2.0
"""Whether a test left something of the engine behind in this process."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def threads() -> set[str]:
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def descriptors() -> dict[str, str]:
    """Return what each open descriptor refers to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # Another thread may close one between the listing and the look, and the listing's own is gone by then.
        with contextlib.suppress(FileNotFoundError):
            found[entry.name] = str(entry.readlink())
    return found


def sockets() -> int:
    return sum(target.startswith("socket:") for target in descriptors().values())


def eventually(condition: Callable[[], bool], timeout: float = 90.0) -> bool:
    """Return whether `condition` became true in time. For what another thread or process is about to do."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that the threads and descriptors of this process are at the end what they were at the start."""
    threads_before, descriptors_before = threads(), descriptors()

    def left() -> list[str]:
        new = {fd: target for fd, target in descriptors().items() if descriptors_before.get(fd) != target}
        return [f"thread {thread}" for thread in threads() - threads_before] + [
            f"descriptor {fd}: {target}" for fd, target in new.items()
        ]

    yield
    if left():
        gc.collect()
    # The kernel takes a moment to remove a thread that was joined.
    eventually(lambda: not left(), timeout=5.0)
    assert not left(), f"left behind: {left()}"
