# SPDX-License-Identifier: Apache-2.0
"""Which device a thread uses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from fake_cuda import FakeCuda

__all__ = ["current"]


@contextmanager
def current(cuda: FakeCuda, device: int) -> Iterator[None]:
    """Use `device` on this thread, and then the one that was used before."""
    before = ctypes.c_void_p()
    cuda.call("cuCtxGetCurrent", ctypes.byref(before))
    cuda.start(device)
    try:
        yield
    finally:
        cuda.stop(device)
        cuda.call("cuCtxSetCurrent", before)
