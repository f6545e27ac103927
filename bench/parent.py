# SPDX-License-Identifier: Apache-2.0
"""A process that the kernel ends when its parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

__all__ = ["die_with_parent"]

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> bool:
    """Have the kernel end this process when its parent ends, also while it is stopped; False: the parent has ended."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
