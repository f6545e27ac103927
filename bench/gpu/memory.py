# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU for one side of rows, and its image in memory of the host, where bytes are made and compared."""

from __future__ import annotations

from moonpool.bench.gpu.driver import Driver
from moonpool.bench.memory import allocate

__all__ = ["GpuMemory"]


class GpuMemory:
    """Memory of a GPU. Used by one thread.

    Args:
        device: CUDA ordinal of the GPU.
        nbytes: how much.

    Attributes:
        address: where it is.
        image: of the same length; see `push` and `pull`.

    Raises:
        DriverError: there is no such GPU, or it has no room.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        self._driver = Driver(device)
        self.device = device
        self.address = self._driver.number("cuMemAlloc_v2", nbytes)
        self.image = allocate(nbytes)

    def push(self) -> None:
        """Make the GPU's memory what the image is."""
        self._driver.enter()
        self._driver.put(self.address, self.image)

    def pull(self) -> None:
        """Make the image what the GPU's memory is."""
        self._driver.enter()
        self.image[:] = self._driver.get(self.address, len(self.image))

    def close(self) -> None:
        """Free it. Nothing may use it any more."""
        self._driver.enter()
        self._driver.call("cuMemFree_v2", self.address)
        self._driver.close()
