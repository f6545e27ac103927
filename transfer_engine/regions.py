# SPDX-License-Identifier: Apache-2.0
"""Memory that peers may read and write: regions of this engine, and handles on those of a peer."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from moonpool import _native
from moonpool.transfer_engine.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    OutOfRangeError,
    RegionReadOnlyError,
)

__all__ = ["Memory", "Region", "RemoteRegion", "find_memory"]


class Region(_native.Region):
    """Memory of this process that transfers may use, made by `TransferEngine.allocate` or `TransferEngine.register`.

    A region has the buffer protocol: ``memoryview(region)``, ``numpy.frombuffer(region, dtype=...)`` and
    ``torch.frombuffer(region, dtype=...)`` share its bytes without a copy. A view keeps the bytes alive: the memory of
    an allocated region is freed only when the region is released (or its engine closed) *and* the last view is gone,
    and a registered object is held for as long. Memory registered as ``(address, nbytes)`` is the caller's to keep.

    The engine holds every region until `release` or `TransferEngine.close`, so a region stays reachable for peers even
    when the caller keeps no reference to it.

    Thread-safe.

    Attributes:
        address: where it lies in this process.
        nbytes: its length.
        name: the name peers find it by, or None.
        key: the random 64-bit token that peers must name in a request.
        id: a number unique in this engine.
        generation: how often this engine had reused the slot of the region.
        writable: whether peers may write it and reads may land in it.
        allocated: True when the engine owns the memory.
        released: True once it has been released or its engine closed.
    """

    __slots__ = ("__weakref__", "_registry")

    _registry: dict[int, Region]

    def __init__(self) -> None:
        raise ArgumentTypeError(
            "a Region cannot be made directly", hint="engine.allocate(nbytes) or engine.register(object)"
        )

    def release(self) -> None:
        """Withdraw the region: peers are refused from now on. When it returns, nothing reads or writes it any more.

        Calling it again does nothing. Views taken before stay valid (see the class).

        Raises:
            RegionBusyError: a transfer that is not settled uses it. Wait for it or cancel it first.
        """
        self._withdraw()
        self._registry.pop(self.id, None)

    def __repr__(self) -> str:
        name = f"{self.name!r} " if self.name is not None else ""
        kind = "allocated" if self.allocated else "registered"
        flags = ("" if self.writable else ", read-only") + (", released" if self.released else "")
        return f"<Region {name}{self.nbytes} bytes at {self.address:#x}, {kind}{flags}>"


class RemoteRegion(_native.RemoteRegion):
    """A handle on a region of a peer, from ``peer.regions[name]``. It is a value: it holds nothing open.

    It names the incarnation of the peer that owned the region. After a restart of the peer, transfers with an old
    handle fail with `RegionStaleError`; look the name up again.

    Attributes:
        name: the name its owner gave it.
        nbytes: its length.
        key: the token that requests name it by.
        generation: tells it from an earlier region with the same key.
        writable: whether it may be written.
        incarnation: of the peer that owns it, 32 hexadecimal digits.
    """

    __slots__ = ()

    def __init__(self) -> None:
        raise ArgumentTypeError("a RemoteRegion cannot be made directly", hint="peer.regions['name']")

    def _identity(self) -> tuple[str, int, int]:
        return self.incarnation, self.key, self.generation

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteRegion):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        flags = "" if self.writable else ", read-only"
        return f"<RemoteRegion {self.name!r} {self.nbytes} bytes{flags}, of {self.incarnation[:8]}>"


class Memory(NamedTuple):
    """Memory to register: either a buffer to hold, or an address with the object that keeps it valid."""

    view: memoryview | None
    address: int
    nbytes: int
    owner: object


def find_memory(source: Any, *, writable: bool) -> Memory:
    """Find the contiguous CPU memory behind `source`.

    Args:
        source: anything with the buffer protocol or ``__array_interface__``, a CPU tensor of torch, or
            ``(address, nbytes)``.
        writable: refuse memory that is read-only.

    Raises:
        ArgumentTypeError: there is no CPU memory behind it.
        InvalidArgumentError: it is not contiguous, or empty.
        RegionReadOnlyError: it is read-only and `writable` is true.
    """
    if isinstance(source, tuple):
        memory = _from_address(source)
    elif hasattr(source, "__cuda_array_interface__"):
        raise _on_device(source, "GPU memory")
    elif hasattr(source, "data_ptr") and hasattr(source, "element_size"):
        memory = _from_tensor(source)
    else:
        memory = _from_buffer(source, writable) or _from_array_interface(source, writable)
    if memory.nbytes == 0:
        raise InvalidArgumentError(f"the {type(source).__name__} to register is empty", hint="at least 1 byte")
    return memory


def _from_address(source: tuple[Any, ...]) -> Memory:
    if len(source) != 2 or not all(isinstance(number, int) and not isinstance(number, bool) for number in source):
        raise ArgumentTypeError("a tuple to register is not (address, nbytes)", hint="two ints: (address, nbytes)")
    address, nbytes = source
    if address <= 0 or nbytes < 0 or address + nbytes > 1 << 64:
        raise OutOfRangeError(
            f"({address:#x}, {nbytes}) is no memory of this process", hint="the address and length of live memory"
        )
    return Memory(None, address, nbytes, None)


def _from_tensor(tensor: Any) -> Memory:
    # By its methods, so that torch is not imported here.
    if tensor.device.type != "cpu":
        raise _on_device(tensor, f"memory of device {tensor.device}")
    if str(tensor.layout) != "torch.strided":
        raise InvalidArgumentError(f"the tensor has layout {tensor.layout}", hint="a dense tensor: t.to_dense()")
    if not tensor.is_contiguous():
        raise _not_contiguous("tensor", "t.contiguous()")
    return Memory(None, tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def _from_buffer(source: Any, writable: bool) -> Memory | None:
    try:
        view = memoryview(source)
    except (TypeError, ValueError, BufferError):
        # No buffer, or one of a type that the protocol cannot describe, such as numpy.datetime64 or bfloat16.
        return None
    if writable and view.readonly:
        raise _read_only(source)
    if not view.contiguous:
        raise _not_contiguous(type(source).__name__, "a contiguous copy, such as numpy.ascontiguousarray(x)")
    return Memory(view, 0, view.nbytes, None)


def _from_array_interface(source: Any, writable: bool) -> Memory:
    # https://numpy.org/doc/stable/reference/arrays.interface.html
    interface = getattr(source, "__array_interface__", None)
    if not isinstance(interface, dict):
        raise ArgumentTypeError(
            f"a {type(source).__name__} has no memory that can be registered",
            hint="an object with the buffer protocol or __array_interface__, a CPU tensor, or (address, nbytes)",
        )
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise ArgumentTypeError(
            f"the __array_interface__ of a {type(source).__name__} names no address", hint="its buffer, or a numpy copy"
        )
    address, readonly = data
    if writable and readonly:
        raise _read_only(source)
    item_bytes = _item_bytes(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != _c_strides(shape, item_bytes):
        raise _not_contiguous(type(source).__name__, "a C-contiguous copy, such as numpy.ascontiguousarray(x)")
    return Memory(None, address, math.prod(shape) * item_bytes, source)


def _item_bytes(typestr: str) -> int:
    # "<f8", "<M8[ns]"; numpy counts the length of texts ("<U5") in characters of four bytes.
    digits = re.match(r"[<>|=]?[A-Za-z](\d+)", typestr)
    if digits is None:
        raise ArgumentTypeError(
            f"the __array_interface__ has the typestr {typestr!r}", hint="one with a size, such as '<f4'"
        )
    return int(digits[1]) * (4 if "U" in typestr else 1)


def _c_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _on_device(source: Any, what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"a {type(source).__name__} in {what} cannot be registered: this build moves CPU memory only",
        hint="a copy in CPU memory, such as t.cpu() or a pinned host buffer",
    )


def _read_only(source: Any) -> RegionReadOnlyError:
    return RegionReadOnlyError(
        f"the {type(source).__name__} to register is read-only",
        hint="writable=False when peers shall only read it, or memory that can be written, such as a bytearray",
    )


def _not_contiguous(kind: str, hint: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the {kind} to register is not contiguous", hint=hint)
