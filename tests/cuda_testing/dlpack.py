# SPDX-License-Identifier: Apache-2.0
"""Arrays of another library, as DLPack describes them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "DlpackArray"]

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
CUDA_MANAGED: Final = 13


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DlpackArray:
    """`nbytes` bytes at `address`, as an array of 100 columns of 16-bit floats."""

    def __init__(self, address: int, nbytes: int, kind: int, device: int = 0, *, strided: bool = False) -> None:
        rows = nbytes // 200
        self._shape = (ctypes.c_int64 * 2)(rows, 100)
        self._strides = (ctypes.c_int64 * 2)(200 if strided else 100, 1)
        # The offset is part of the address, which libraries forget.
        self._tensor = _Tensor(address - 8, kind, device, 2, 2, 16, 1, self._shape, self._strides, 8, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device_id

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert (stream is None) == (self._tensor.device_type == CPU)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)
