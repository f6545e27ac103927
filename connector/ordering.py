# SPDX-License-Identifier: Apache-2.0
"""Work of a GPU that has to have ended before its memory is read or overwritten.

vLLM queues a step and goes on. What a step has computed is there, and what it reads is free, once its stream has got
that far.
"""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

__all__ = ["AT_ONCE", "Mark", "mark_of"]

# Between two looks. A step takes milliseconds.
_LOOK_SECONDS: Final = 0.0002


class Mark(Protocol):
    """A point in the work that was queued."""

    def reached(self, until: float) -> bool:
        """Wait for it; return whether it has come before `until`, of `time.monotonic`."""


class _AtOnce:
    def reached(self, until: float) -> bool:
        """Return True: a processor has done its work when it goes on."""
        return True


AT_ONCE: Final[Mark] = _AtOnce()


class _EventMark:
    def __init__(self, event: Any) -> None:
        self._event = event

    def reached(self, until: float) -> bool:
        """See `Mark`. An event of torch has no wait that ends."""
        while not self._event.query():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def mark_of(device: Any) -> Mark:
    """Return the point that the current stream of a device of torch has been given work up to."""
    return AT_ONCE if device.type == "cpu" else _EventMark(_record(device))


def _record(device: Any) -> Any:
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
