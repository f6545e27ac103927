# SPDX-License-Identifier: Apache-2.0
"""A stand-in for libcuda.so.1: builds it, and is the program that owns device memory, as torch would be.

`library` has the path for ``MOONPOOL_CUDA_LIBRARY``. `FakeCuda` is the same library in this process, with what tests
ask of it: the rules are those of ``fake_cuda.h``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["CudaError", "DeviceMemory", "FakeCuda", "environment", "library"]

_HERE: Final = Path(__file__).parent
_BUILT: Final = _HERE.parents[1] / "build" / "fake_cuda"
_FLAGS: Final = ("-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread")


def library(without: Sequence[str] = ()) -> Path:
    """Return where the stand-in is. It is built when it is asked for first, in a few seconds.

    Args:
        without: functions that it does not have, as an older driver.
    """
    sources = sorted(_HERE.glob("*.cpp"))
    compiler = shutil.which("c++")
    assert compiler is not None, "the stand-in for libcuda needs a C++ compiler. Try: apt-get install g++"
    digest = hashlib.sha256(repr((compiler, _FLAGS)).encode())
    for file in [*sources, *sorted(_HERE.glob("*.h")), *sorted(_HERE.glob("*.hpp"))]:
        digest.update(file.read_bytes())
    objects = _BUILT / digest.hexdigest()[:16]
    variant = objects / ("all" if not without else hashlib.sha256(repr(sorted(without)).encode()).hexdigest()[:16])
    built = variant / "libcuda.so.1"
    if not built.exists():
        # Several processes of a test run may do so at the same time; each renames what is whole.
        objects.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=objects) as name:
            folder = Path(name)
            _link(compiler, _compile(compiler, sources, objects, folder), without, folder / "libcuda.so.1")
            variant.mkdir(exist_ok=True)
            (folder / "libcuda.so.1").replace(built)
    return built


def _compile(compiler: str, sources: list[Path], objects: Path, folder: Path) -> list[Path]:
    compiled = [objects / f"{source.stem}.o" for source in sources]
    jobs = [
        (subprocess.Popen([compiler, *_FLAGS, "-c", str(source), "-o", str(folder / one.name)]), folder / one.name, one)
        for source, one in zip(sources, compiled, strict=True)
        if not one.exists()
    ]
    failed = [str(part) for process, part, _ in jobs if process.wait() != 0]
    assert not failed, f"the stand-in for libcuda does not compile: {failed}"
    for _, part, one in jobs:
        part.replace(one)
    return compiled


def _link(compiler: str, compiled: list[Path], without: Sequence[str], to: Path) -> None:
    script = to.with_suffix(".map")
    hidden = "".join(f" {name};" for name in without)
    script.write_text(f"{{ global: cu[A-Z]*; fakeCuda*; local:{hidden} *; }};\n", "utf-8")
    command = [compiler, "-shared", "-pthread", "-Wl,-soname,libcuda.so.1", "-Wl,-z,defs"]
    subprocess.run([*command, f"-Wl,--version-script={script}", "-o", str(to), *map(str, compiled)], check=True)


class CudaError(Exception):
    """A function of the driver did not succeed.

    Attributes:
        code: what it returned.
    """

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: {name}")
        self.code = code


class FakeCuda:
    """The stand-in in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        self.lib.fakeCudaCalls.restype = self.lib.fakeCudaAllCalls.restype = ctypes.c_uint64
        self.lib.fakeCudaAlive.restype = ctypes.c_int64

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver. Plain ints are addresses and sizes.

        Raises:
            CudaError: it returned something else than success.
        """
        code = self.code(function, *arguments)
        if code != 0:
            name = ctypes.c_char_p()
            self.lib.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(function, code, (name.value or b"?").decode())

    def code(self, function: str, *arguments: Any) -> int:
        """Call a function of the driver; return what it returned."""
        wide = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments]
        return int(getattr(self.lib, function)(*wide))

    # ---------------------------------------------------------------- what torch would do

    def start(self, device: int = 0) -> None:
        """Begin to use a device on this thread, with its primary context."""
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def stop(self, device: int = 0) -> None:
        """Release what `start` has retained."""
        self.call("cuCtxSetCurrent", ctypes.c_void_p())
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    def alloc(self, nbytes: int) -> int:
        """Allocate memory of the current device; return its address."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Free what `alloc` has allocated."""
        self.call("cuMemFree_v2", address)

    def memory(self, content: bytes, device: int = 0) -> DeviceMemory:
        """Return new memory with this content."""
        address = self.alloc(len(content))
        self.poke(address, content)
        return DeviceMemory(address, len(content), device)

    def stream(self, flags: int = 1) -> int:
        """Create a stream; return its handle."""
        handle = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(handle), flags)
        assert handle.value is not None
        return handle.value

    def event(self, flags: int = 2) -> int:
        """Create an event; return its handle."""
        handle = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(handle), flags)
        assert handle.value is not None
        return handle.value

    # ---------------------------------------------------------------- what tests ask

    def set(self, settings: str) -> None:
        """Change settings, see ``fake_cuda.h``."""
        assert self.lib.fakeCudaSet(settings.encode()) == 0, settings

    def calls(self, name: str) -> int:
        """Return how often a function of the driver was called, or how much streams have done."""
        return int(self.lib.fakeCudaCalls(name.encode()))

    def all_calls(self) -> int:
        """Return how often any function of the driver was called."""
        return int(self.lib.fakeCudaAllCalls())

    def forget_calls(self) -> None:
        """Count from zero."""
        self.lib.fakeCudaForgetCalls()

    def alive(self, kind: str) -> int:
        """Return how many objects of a kind there are."""
        count = int(self.lib.fakeCudaAlive(kind.encode()))
        assert count >= 0, kind
        return count

    def kill_context(self, device: int, code: int) -> None:
        """Let the primary context of a device be dead."""
        self.lib.fakeCudaBreak(device, code)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep streams from their work."""
        self.lib.fakeCudaHold(1)
        try:
            yield
        finally:
            self.lib.fakeCudaHold(0)

    def peek(self, address: int, nbytes: int) -> bytes:
        """Return bytes of device memory."""
        buffer = ctypes.create_string_buffer(nbytes)
        assert self.lib.fakeCudaPeek(ctypes.c_uint64(address), buffer, ctypes.c_size_t(nbytes)) == 0
        return buffer.raw

    def poke(self, address: int, content: bytes) -> None:
        """Change bytes of device memory."""
        assert self.lib.fakeCudaPoke(ctypes.c_uint64(address), content, ctypes.c_size_t(len(content))) == 0

    @contextmanager
    def opened(self, address: int, nbytes: int) -> Iterator[None]:
        """Let CPUs at this memory, as nvidia-peermem lets a NIC: while verbs registers it."""
        assert self.lib.fakeCudaOpen(ctypes.c_uint64(address), ctypes.c_size_t(nbytes), 1) == 0
        try:
            yield
        finally:
            assert self.lib.fakeCudaOpen(ctypes.c_uint64(address), ctypes.c_size_t(nbytes), 0) == 0


class DeviceMemory:
    """Memory of a device, as libraries hand it to each other.

    Attributes:
        address: where it is.
        nbytes: its length.
        device: number of the device.
    """

    def __init__(self, address: int, nbytes: int, device: int = 0) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "stream": None}


def environment(path: Path, settings: str = "") -> dict[str, str]:
    """Return the environment of a process that finds the stand-in."""
    return {**os.environ, "MOONPOOL_CUDA_LIBRARY": str(path), "FAKE_CUDA": settings}
