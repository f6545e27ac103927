# SPDX-License-Identifier: Apache-2.0
"""Memory that peers may read and write: regions of this engine, and handles on those of a peer."""

from __future__ import annotations

from typing import NoReturn

from moonpool import _native
from moonpool.transfer_engine.errors import ArgumentTypeError

__all__ = ["Region", "RemoteRegion"]


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
        writable: whether peers may write it. Reads of this engine may land in it then, or when it is `allocated`.
        allocated: True when the engine owns the memory.
        shared: whether peers on the same host can map it: allocated memory with a name. Such memory is also shared
            with forked children, while other allocated memory is copied for them when either side writes.
        page_bytes: the page size of allocated memory, as far as it is certain: 2 MiB after ``huge_pages=True``. None
            for registered memory.
        location: where it is: ``"cuda:0"``, or ``"cpu:1"`` with the NUMA node of its first page (``"cpu"`` while that
            page was never touched). A region of a GPU has no buffer: no processor can read it.
        released: True once it has been released or its engine closed.
    """

    __slots__ = ("__weakref__", "_registry")

    _registry: dict[int, Region]

    def __init__(self) -> None:
        raise ArgumentTypeError(
            "a Region cannot be made directly", hint="engine.allocate(nbytes) or engine.register(object)"
        )

    def release(self) -> None:
        """Withdraw the region: peers are refused from now on.

        When it returns, nothing writes it any more, and no read of it completes. Calling it again does nothing. Views
        taken before stay valid (see the class).

        Raises:
            RegionBusyError: a transfer that is not settled uses it. Wait for it or cancel it first.

        A process on the same host that was stopped in the middle of a copy of memory that the engine allocated is
        waited for, at most ``progress_timeout``. Then the bytes move to pages of their own, so that what it still
        writes goes nowhere.
        """
        self._withdraw()
        self._registry.pop(self.id, None)

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a Region cannot be copied or pickled", hint="peer.regions['name'] in the other process, or bytes(region)"
        )

    def __repr__(self) -> str:
        name = f"{self.name!r} " if self.name is not None else ""
        kind = "allocated" if self.allocated else "registered"
        flags = ("" if self.writable else ", read-only") + (", released" if self.released else "")
        return f"<Region {name}{self.nbytes} bytes at {self.address:#x}, {kind}{flags}>"


class RemoteRegion(_native.RemoteRegion):
    """A handle on a region of a peer, from ``peer.regions[name]``. It is a value: it holds nothing open.

    It can be compared, hashed, copied and pickled. Any engine that is connected to the same peer can use it, also one
    in another process. Whoever has the handle and the cluster secret can reach the region, so treat it as the secret.

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
