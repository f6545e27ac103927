# SPDX-License-Identifier: Apache-2.0
"""Names of GPUs, and memory that is described by DLPack."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from moonpool import _native
from moonpool.transfer_engine.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["ANY", "DlpackMemory", "from_dlpack", "ordinal"]

#: Whichever GPU the memory is of: the driver knows.
ANY: Final = -1

# DLDeviceType, https://dmlc.github.io/dlpack/latest/c_api.html
_CPU: Final = 1
_CUDA: Final = 2
_CUDA_HOST: Final = 3
_CUDA_MANAGED: Final = 13
# mp_memory_kind
_PINNED: Final = 1


def ordinal(name: Any) -> int | None:
    """Return the number of the GPU that ``"cuda:0"`` names, `ANY` for ``"cuda"``, None for ``"cpu"``."""
    if name == "cpu":
        return None
    parts = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", name) if isinstance(name, str) else None
    if parts is None:
        raise ArgumentTypeError(f"{name!r} is no device", hint="'cuda:0', 'cuda' for whichever GPU it is, or 'cpu'")
    return ANY if parts[1] is None else int(parts[1])


class DlpackMemory(NamedTuple):
    """Where the elements of a DLPack tensor lie. `owner` is the capsule, which holds the memory until it is dropped."""

    address: int
    nbytes: int
    contiguous: bool
    device: int | None
    owner: object


def from_dlpack(source: Any) -> DlpackMemory:
    """Return the memory behind an object with ``__dlpack__``, without a copy.

    Nothing is ordered with the streams of its library: ``stream=`` of a transfer does that.

    Raises:
        ArgumentTypeError: it gives no capsule, or one of a device that cannot be registered.
        InvalidArgumentError: pinned memory that the driver does not know as such.
    """
    try:
        kind, _ = source.__dlpack_device__()
        # -1: "do not synchronise"; a library of CPU arrays takes no stream.
        capsule = source.__dlpack__() if kind == _CPU else source.__dlpack__(stream=-1)
    except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as cause:
        raise ArgumentTypeError(
            f"a {type(source).__name__} gives no DLPack capsule", cause=str(cause), hint="a dense array or tensor"
        ) from cause
    kind, device, address, nbytes, contiguous = _native.dlpack_memory(capsule)
    if kind in (_CUDA, _CUDA_MANAGED):
        return DlpackMemory(address, nbytes, contiguous, device, capsule)
    if kind not in (_CPU, _CUDA_HOST):
        raise ArgumentTypeError(
            f"a {type(source).__name__} lies in memory of DLPack device {kind}, which cannot be registered",
            hint="memory of the host or of an NVIDIA GPU",
        )
    if kind == _CUDA_HOST and nbytes and _native.cuda_memory_kind(address, nbytes)[0] != _PINNED:
        raise InvalidArgumentError(
            f"a {type(source).__name__} says that it is pinned, but the CUDA driver does not know its memory",
            hint="pinned memory, or an object that says it is in plain CPU memory",
        )
    return DlpackMemory(address, nbytes, contiguous, None, capsule)
