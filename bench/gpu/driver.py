# SPDX-License-Identifier: Apache-2.0
"""libcuda by itself: what a program has that uses a GPU without any library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from moonpool.bench.errors import BenchError

__all__ = ["GRANULE", "Driver", "DriverError"]

#: Of memory that is mapped.
GRANULE: Final = 2 << 20


class DriverError(BenchError):
    """A call of the driver failed, or there is no driver."""

    default_code = "BENCH_CUDA"


_OUT_OF_MEMORY: Final = 2


class Driver:
    """libcuda with the primary context of one device, as a program that uses the GPU has it."""

    def __init__(self, device: int) -> None:
        name = os.environ.get("MOONPOOL_CUDA_LIBRARY") or "libcuda.so.1"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise DriverError(f"{name} cannot be opened", cause=str(error), hint="a host with an NVIDIA GPU") from error
        self.device = device
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        if device >= count.value:
            raise DriverError(
                f"there is no cuda:{device}: this process sees {count.value} GPUs", hint="see CUDA_VISIBLE_DEVICES"
            )
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ctypes.c_int(device))
        self.enter()
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        self._stream = stream

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. Plain ints are addresses and sizes."""
        wide = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments]
        code = getattr(self._library, function)(*wide)
        if code != 0:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            hint = "less memory, such as a smaller --footprint" if code == _OUT_OF_MEMORY else ""
            said = (name.value or str(code).encode()).decode()
            raise DriverError(f"cuda:{self.device}: {function}: {said}", hint=hint)

    def enter(self) -> None:
        """Use the device on this thread, too."""
        self.call("cuCtxSetCurrent", self._context)

    def number(self, function: str, *arguments: Any) -> int:
        """Call a function whose first argument is a 64-bit number that it writes."""
        value = ctypes.c_uint64()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def attribute(self, which: int) -> int:
        """Return CU_DEVICE_ATTRIBUTE number `which`."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), ctypes.c_int(self.device))
        return value.value

    def text(self, function: str) -> str:
        """Return what a function writes of the device as text."""
        text = ctypes.create_string_buffer(256)
        self.call(function, text, ctypes.c_int(256), ctypes.c_int(self.device))
        return text.value.decode()

    def version(self) -> int:
        """Return the CUDA version of the driver: 12080 is 12.8."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    def unused(self) -> int:
        """Return how many bytes of the device are free."""
        unused, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(unused), ctypes.byref(total))
        return unused.value

    def put(self, address: int, content: np.ndarray[Any, Any]) -> None:
        """Fill memory of the device."""
        self.call("cuMemcpyHtoD_v2", address, content.ctypes.data, content.nbytes)
        self.call("cuCtxSynchronize")

    def get(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return memory of the device."""
        content = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", content.ctypes.data, address, nbytes)
        return content

    def copies(self, to: int, source: int, nbytes: int, count: int) -> None:
        """Copy so often on one stream, and wait: what a program without any library gets."""
        for _ in range(count):
            self.call("cuMemcpyAsync", to, source, nbytes, self._stream)
        self.call("cuStreamSynchronize", self._stream)

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[int]:
        """Have memory of the device."""
        address = self.number("cuMemAlloc_v2", nbytes)
        try:
            yield address
        finally:
            self.call("cuMemFree_v2", address)

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[int]:
        """Have pinned memory of the host."""
        address = self.number("cuMemHostAlloc", nbytes, ctypes.c_uint(1))
        try:
            yield address
        finally:
            self.call("cuMemFreeHost", ctypes.c_void_p(address))

    @contextmanager
    def mapped(self, parts: int) -> Iterator[int]:
        """Have so many granules that are mapped one after the other, as expandable segments are."""
        properties = (ctypes.c_uint32 * 8)(1, 1, 1, self.device)
        access = (ctypes.c_int * 3)(1, self.device, 3)
        address, handles = self.number("cuMemAddressReserve", parts * GRANULE, 0, 0, 0), []
        try:
            for part in range(parts):
                handles.append(self.number("cuMemCreate", GRANULE, properties, 0))
                self.call("cuMemMap", address + part * GRANULE, GRANULE, 0, handles[-1], 0)
            self.call("cuMemSetAccess", address, parts * GRANULE, access, 1)
            yield address
        finally:
            if handles:
                self.call("cuMemUnmap", address, len(handles) * GRANULE)
            for handle in handles:
                self.call("cuMemRelease", handle)
            self.call("cuMemAddressFree", address, parts * GRANULE)

    def close(self) -> None:
        """Let the context go."""
        self.call("cuStreamDestroy_v2", self._stream)
        self.call("cuCtxSetCurrent", ctypes.c_void_p())
        self.call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(self.device))
