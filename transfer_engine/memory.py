# SPDX-License-Identifier: Apache-2.0
"""Finding the memory behind an object that is to be registered."""

from __future__ import annotations

import math
import operator
import re
from typing import Any, Final, NamedTuple

from moonpool.transfer_engine import _device
from moonpool.transfer_engine.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    MoonpoolError,
    OutOfRangeError,
    RegionReadOnlyError,
)

__all__ = ["Memory", "find_memory"]

_ADDRESSES: Final = 1 << 64
# What makes a copy that can be registered of an array with this attribute.
_COPIES: Final = {
    "__array_interface__": "numpy.ascontiguousarray(x)",
    "__cuda_array_interface__": "x.contiguous() of torch, or cupy.ascontiguousarray(x)",
}


class Memory(NamedTuple):
    """Memory to register: either a buffer to hold, or an address with the object that keeps it valid.

    `device` is the ordinal of the GPU whose memory it is, `_device.ANY` where the object does not say, None for memory
    of the host.
    """

    view: memoryview | None
    address: int
    nbytes: int
    owner: object
    device: int | None = None


def find_memory(source: Any, *, writable: bool) -> Memory:
    """Find the contiguous memory behind `source`.

    Args:
        source: anything with the buffer protocol, ``__array_interface__``, ``__cuda_array_interface__`` or
            ``__dlpack__``, a tensor of torch, ``(address, nbytes)`` or ``(address, nbytes, device)``.
        writable: refuse memory that is read-only.

    Raises:
        ArgumentTypeError: there is no memory behind it that can be registered.
        InvalidArgumentError: it is not contiguous, or empty, or not what it says it is.
        RegionReadOnlyError: it is read-only and `writable` is true.
    """
    if not isinstance(writable, bool):
        raise ArgumentTypeError(f"writable is a {type(writable).__name__}", hint="True or False")
    if isinstance(source, tuple):
        memory = _from_address(source)
    elif hasattr(source, "data_ptr") and hasattr(source, "element_size"):
        memory = _from_tensor(source)
    elif hasattr(source, "__cuda_array_interface__"):
        memory = _from_interface(source, writable, "__cuda_array_interface__", _device.ANY)
    else:
        memory = (
            _from_buffer(source, writable)
            or _from_dlpack(source)
            or _from_interface(source, writable, "__array_interface__", None)
        )
    if memory.nbytes == 0:
        raise InvalidArgumentError(f"the {type(source).__name__} to register is empty", hint="at least 1 byte")
    return memory


def _from_address(source: tuple[Any, ...]) -> Memory:
    numbers = source[:2]
    if len(source) not in (2, 3) or not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise ArgumentTypeError(
            "a tuple to register is neither (address, nbytes) nor (address, nbytes, device)",
            hint="two ints, and for memory of a GPU its name, such as 'cuda:0'",
        )
    address, nbytes = numbers
    _check_range(address, nbytes, "the tuple to register")
    return Memory(None, address, nbytes, None, _device.ordinal(source[2]) if len(source) == 3 else None)


def _from_dlpack(source: Any) -> Memory | None:
    if not hasattr(source, "__dlpack__") or hasattr(source, "__array_interface__"):
        return None
    found = _device.from_dlpack(source)
    if not found.contiguous:
        raise _not_contiguous(type(source).__name__, "a contiguous copy")
    if found.nbytes:
        _check_range(found.address, found.nbytes, f"the DLPack capsule of a {type(source).__name__}")
    return Memory(None, found.address, found.nbytes, found.owner, found.device)


def _check_range(address: int, nbytes: int, what: str) -> None:
    if not (0 < address < _ADDRESSES and 0 <= nbytes <= _ADDRESSES - address):
        # In hexadecimal: Python refuses to write out ints of thousands of digits in decimal.
        raise OutOfRangeError(
            f"{what} names {nbytes:#x} bytes at {address:#x}, which is no memory of this process",
            hint="the address and length of live memory",
        )


def _from_tensor(tensor: Any) -> Memory:
    # By its methods, so that torch is not imported here.
    try:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ArgumentTypeError(
                f"a {type(tensor).__name__} in memory of device {tensor.device} cannot be registered",
                hint="memory of the host or of an NVIDIA GPU, such as t.cpu()",
            )
        if str(tensor.layout) != "torch.strided":
            raise InvalidArgumentError(f"the tensor has layout {tensor.layout}", hint="a dense tensor: t.to_dense()")
        if not tensor.is_contiguous():
            raise _not_contiguous("tensor", "t.contiguous()")
        device = (_device.ANY if tensor.device.index is None else tensor.device.index) if tensor.is_cuda else None
        return Memory(None, tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor, device)
    except (AttributeError, TypeError, RuntimeError) as cause:
        if isinstance(cause, MoonpoolError):
            raise
        # A storage, a fake tensor, or something of another library.
        raise ArgumentTypeError(
            f"a {type(tensor).__name__} does not tell where its memory lies",
            cause=str(cause),
            hint="a dense tensor of torch, or its t.numpy()",
        ) from cause


def _from_buffer(source: Any, writable: bool) -> Memory | None:
    try:
        view = memoryview(source)
    except MoonpoolError:
        raise  # a region that is released
    except (TypeError, ValueError, BufferError):
        # No buffer, or one of a type that the protocol cannot describe, such as numpy.datetime64 or bfloat16.
        return None
    if view.format.lstrip("@=<>!") == "O" or getattr(getattr(source, "dtype", None), "hasobject", False):
        raise _of_objects(source)
    if writable and view.readonly:
        raise _read_only(source)
    if not view.contiguous:
        raise _not_contiguous(type(source).__name__, "a contiguous copy, such as numpy.ascontiguousarray(x)")
    return Memory(view, 0, view.nbytes, None)


def _from_interface(source: Any, writable: bool, attribute: str, device: int | None) -> Memory:
    # https://numpy.org/doc/stable/reference/arrays.interface.html, and its twin for memory of a GPU:
    # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    interface = getattr(source, attribute, None)
    if not isinstance(interface, dict):
        raise ArgumentTypeError(
            f"a {type(source).__name__} has no memory that can be registered",
            hint="an object with the buffer protocol, an array, a tensor, or (address, nbytes)",
        )
    kind = type(source).__name__
    item_bytes = _item_bytes(source, interface.get("typestr"))
    shape = _whole_numbers(interface.get("shape"), f"the shape in the {attribute} of a {kind}")
    if min(shape, default=0) < 0:
        raise _malformed(f"the shape in the {attribute} of a {kind} is negative")
    nbytes = math.prod(shape) * item_bytes
    address, readonly = _address_and_access(kind, attribute, interface, nbytes)
    if writable and readonly:
        raise _read_only(source)
    strides = interface.get("strides")
    if strides is not None:
        strides = _whole_numbers(strides, f"the strides in the {attribute} of a {kind}")
        if len(strides) != len(shape):
            raise _malformed(f"the {attribute} of a {kind} has {len(shape)} lengths and {len(strides)} strides")
        # An axis of one element is never stepped along.
        stepped = zip(shape, strides, _c_strides(shape, item_bytes), strict=True)
        if nbytes and any(count > 1 and stride != contiguous for count, stride, contiguous in stepped):
            raise _not_contiguous(kind, f"a C-contiguous copy, such as {_COPIES[attribute]}")
    return Memory(None, address, nbytes, source, device)


def _address_and_access(kind: str, attribute: str, interface: dict[str, Any], nbytes: int) -> tuple[int, bool]:
    data = interface.get("data")
    if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[1], bool):
        raise ArgumentTypeError(
            f"the {attribute} of a {kind} names no address: its data is not (address, read-only)",
            hint=f"a copy with memory of its own, such as {_COPIES[attribute]}",
        )
    (address,) = _whole_numbers(data[:1], f"the address in the {attribute} of a {kind}")
    # Both are lawful and would make the region other bytes than those of the array.
    offset = interface.get("offset")
    for key, harmless in (
        ("offset", offset is None or (isinstance(offset, int) and offset == 0)),
        ("mask", interface.get("mask") is None),
    ):
        if not harmless:
            raise InvalidArgumentError(
                f"the {attribute} of a {kind} has the key {key!r}, which cannot be honoured",
                hint=_COPIES[attribute],
            )
    if nbytes:
        _check_range(address, nbytes, f"the {attribute} of a {kind}")
    return address, data[1]


def _item_bytes(source: Any, typestr: Any) -> int:
    # "<f8", "<M8[ns]"; numpy counts the length of texts ("<U5") in characters of four bytes.
    parts = re.match(r"[<>|=]?([A-Za-z])([0-9]{1,18})(?:\[|$)", typestr) if isinstance(typestr, str) else None
    if parts is None or parts[1] == "t":  # bit fields
        raise _malformed(f"the array interface of a {type(source).__name__} has no typestr with a size in bytes")
    if parts[1] == "O":
        raise _of_objects(source)
    return int(parts[2]) * (4 if parts[1] == "U" else 1)


def _whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    if isinstance(values, (tuple, list)) and not any(isinstance(value, bool) for value in values):
        try:
            return tuple(map(operator.index, values))
        except TypeError:
            pass
    raise _malformed(f"{what} is not made of ints")


def _c_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _of_objects(source: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"a {type(source).__name__} of Python objects cannot be registered: its bytes are addresses of this process",
        hint="an array of numbers",
    )


def _malformed(message: str) -> ArgumentTypeError:
    return ArgumentTypeError(message, hint="https://numpy.org/doc/stable/reference/arrays.interface.html")


def _read_only(source: Any) -> RegionReadOnlyError:
    return RegionReadOnlyError(
        f"the {type(source).__name__} to register is read-only",
        hint="writable=False when peers shall only read it, or memory that can be written, such as a bytearray",
    )


def _not_contiguous(kind: str, hint: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the {kind} to register is not contiguous", hint=hint)
