# SPDX-License-Identifier: Apache-2.0
"""Memory that is mapped in parts, as torch's expandable segments are."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Final

from fake_cuda import FakeCuda
from typing_extensions import Self

__all__ = ["PART_BYTES", "VirtualMemory"]

PART_BYTES: Final = 2 << 20


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class VirtualMemory:
    """`parts` allocations of 2 MiB, one after the other, at the beginning of a reservation.

    Other processes may have them if they are `shareable`.

    Attributes:
        address: where it is.
        nbytes: how much of it is mapped.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        parts: int,
        reserved_parts: int | None = None,
        device: int = 0,
        *,
        shareable: bool = False,
    ) -> None:
        self._cuda = cuda
        self._reserved = (reserved_parts or parts) * PART_BYTES
        self._handles: list[int] = []
        self.nbytes = parts * PART_BYTES
        address = ctypes.c_uint64()
        cuda.call("cuMemAddressReserve", ctypes.byref(address), self._reserved, 0, 0, 0)
        self.address = address.value
        properties = _Properties(1, int(shareable), 1, device, None, (ctypes.c_uint8 * 8)())
        for part in range(parts):
            handle = ctypes.c_uint64()
            cuda.call("cuMemCreate", ctypes.byref(handle), PART_BYTES, ctypes.byref(properties), 0)
            cuda.call("cuMemMap", self.address + part * PART_BYTES, PART_BYTES, 0, handle.value, 0)
            self._handles.append(handle.value)
        access = _Access(1, device, 3)
        cuda.call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(access), 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cuda.call("cuMemUnmap", self.address, self.nbytes)
        for handle in self._handles:
            self._cuda.call("cuMemRelease", handle)
        self._cuda.call("cuMemAddressFree", self.address, self._reserved)
