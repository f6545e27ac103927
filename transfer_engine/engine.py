# SPDX-License-Identifier: Apache-2.0
"""The transfer engine: one object that owns regions, peers and everything in flight between them."""

from __future__ import annotations

import json
import operator
import re
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, overload

from moonpool import _native
from moonpool.transfer_engine._lifetime import Lifetime, Place
from moonpool.transfer_engine.errors import ArgumentTypeError, InvalidArgumentError
from moonpool.transfer_engine.memory import find_memory
from moonpool.transfer_engine.peers import Peer
from moonpool.transfer_engine.regions import Region, RemoteRegion
from moonpool.transfer_engine.settings import EngineSettings
from moonpool.transfer_engine.transfers import Plan, Transfer

if TYPE_CHECKING:
    from typing import Protocol, SupportsIndex, TypeAlias, TypedDict

    from typing_extensions import Buffer, Self, Unpack

    from moonpool.transfer_engine.settings import EngineOptions

    class NumpyArray(Protocol):
        """What marks an array for type checkers: numpy declares its buffers to them only from Python 3.12 on."""

        @property
        def __array_interface__(self) -> dict[str, Any]: ...

    Numbers: TypeAlias = (
        SupportsIndex | Buffer | NumpyArray | list[SupportsIndex] | list[int] | tuple[SupportsIndex, ...] | range
    )
    Locals: TypeAlias = Region | tuple[Sequence[Region], Numbers]
    Item: TypeAlias = tuple[Region, SupportsIndex, RemoteRegion, SupportsIndex, SupportsIndex]

    class TransferOptions(TypedDict, total=False):
        """The options that every transfer takes; `TransferEngine.read` explains them."""

        deadline: float | None
        deadline_at: float | None
        notify: Buffer | None
        digest: bool
        stream: Any


__all__ = ["Notification", "TransferEngine"]

_READ: Final = _native.READ
_WRITE: Final = _native.WRITE
_HERE: Final = str(Path(__file__).parent)


@dataclass(frozen=True)
class Notification:
    """What a peer sent along with a transfer. The bytes of the transfer were in place before it was delivered.

    Attributes:
        peer: the name of the sender.
        incarnation: the identity of the sender's engine, 32 hexadecimal digits.
        payload: what the sender gave as ``notify=``.
    """

    peer: str
    incarnation: str
    payload: bytes


class TransferEngine:
    """Moves bytes between registered memory of this process and of its peers.

    ::

        with TransferEngine("decode-0", listen="0.0.0.0:7700", secret=b"...") as engine:
            kv = engine.allocate(1 << 30, name="kv")
            peer = engine.connect("prefill-0:7700")
            engine.read(peer, kv, peer.regions["kv"]).wait()

    Args:
        name: what peers see; None: the setting ``name``.
        settings: every setting at once, for callers that have read them already. Excludes `options`.
        options: single settings by name, see `EngineSettings`. What is not given comes from the environment
            (``MOONPOOL_ENGINE_*``), the file that ``MOONPOOL_CONFIG`` names, and the defaults.

    Raises:
        ConfigError: an unknown option, a wrong type, an impossible value, or listening beyond loopback without a
            secret. The hint names the nearest valid choice.
        TransportUnavailableError: a named transport is not there.
        AddressError: `listen` is not an address.
        ListenError: the address cannot be listened on.

    A context manager. Close it: an engine that was not is closed when it is collected or the interpreter ends, with a
    `ResourceWarning` that names the place it was made. All methods are thread-safe. In a forked child every method
    raises `ForkedError`, also those of its peers and transfers, except `close`, which only drops what the child
    inherited.
    """

    def __init__(
        self, name: str | None = None, *, settings: EngineSettings | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        arguments = dict(options) if name is None else {"name": name, **options}
        if settings is None:
            settings = EngineSettings.load(arguments)
        elif not isinstance(settings, EngineSettings):
            raise ArgumentTypeError(
                f"settings is a {type(settings).__name__}", hint="an EngineSettings, from EngineSettings.load(...)"
            )
        elif arguments:
            raise InvalidArgumentError(
                f"settings= was given together with {', '.join(arguments)}",
                hint="dataclasses.replace(settings, ...) to change single ones",
            )
        else:
            settings.check()
        self._settings = settings
        self._native = self._open(settings.native_arguments())
        self._lifetime = Lifetime(self._native, settings.name, _calling_place())
        weakref.finalize(self, self._lifetime.abandon)

    def _open(self, arguments: dict[str, Any]) -> _native.Engine:
        """`moonpool.transfer_engine.testing.FaultyEngine` opens one that misbehaves."""
        return _native.Engine(**arguments)

    # ---------------------------------------------------------------- identity

    @property
    def name(self) -> str:
        """The name peers see."""
        return self._settings.name

    @property
    def address(self) -> str | None:
        """The ``host:port`` it listens on, with the port that was chosen; None when it accepts nobody."""
        return self._native.address or None

    @property
    def incarnation(self) -> str:
        """The random identity of this engine, 32 hexadecimal digits. A restarted process has another one."""
        return self._native.incarnation

    @property
    def settings(self) -> EngineSettings:
        """The settings in force."""
        return self._settings

    @property
    def closed(self) -> bool:
        """Whether `close` has finished."""
        return self._lifetime.closed

    # ---------------------------------------------------------------- memory

    def owns(self, region: Region) -> bool:
        """Return whether `region` is one of this engine that was not released."""
        return self._lifetime.regions.get(region.id) is region

    def allocate(
        self,
        nbytes: int,
        name: str | None = None,
        *,
        writable: bool = True,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
    ) -> Region:
        """Allocate a region of zeroed, page-aligned memory.

        With a name it is memory that peers on the same host can map, which is their fastest way to it.

        Args:
            nbytes: its length, at least 1.
            name: what peers find it by: up to 255 bytes of UTF-8, unique among the live regions of the engine. Without
                a name only this engine uses it, as the local side of transfers.
            writable: whether peers may write it. This process always may.
            huge_pages: True: 2 MiB pages, at once, or an error. False: none. None: wherever the kernel offers them for
                such memory, from 2 MiB on.
            numa_node: the preferred NUMA node. None: the node of the thread that touches a page first.

        Raises:
            OutOfRangeError: `nbytes` is not positive.
            OutOfMemoryError: there is no such memory.
            InvalidArgumentError: the name is taken or too long, or the host has no such node.
            LimitError: ``regions_max`` regions are registered.
        """
        return self._lifetime.adopt(self._native.allocate(Region, nbytes, name, writable, huge_pages, numa_node))

    def register(self, source: Any, name: str | None = None, *, writable: bool = True) -> Region:
        """Register memory that exists already. Nothing is copied.

        The object is kept alive, and where it has the buffer protocol it cannot be resized, until the region is
        released or the engine closed. A tensor of torch can be: ``resize_`` of one that is registered frees memory that
        peers still reach, so do not.

        Args:
            source: contiguous memory of the host or of a GPU: anything with the buffer protocol,
                ``__array_interface__``, ``__cuda_array_interface__`` or ``__dlpack__``, a tensor of torch, or
                ``(address, nbytes)``, which the caller keeps valid until the region is released. For memory of a GPU
                that is ``(address, nbytes, "cuda:0")``. docs/gpu.md says how bytes get to it and from it.
            name: as in `allocate`.
            writable: whether peers may write it and reads may land in it.

        Raises:
            ArgumentTypeError: `source` has no memory that can be registered.
            InvalidArgumentError: it is empty or not contiguous, is not of the kind or device that it says it is, or the
                name is taken or too long.
            CudaError: memory of a GPU, and the CUDA driver is missing or refused it.
            RegionReadOnlyError: it is read-only and `writable` is true.
            LimitError: ``regions_max`` regions are registered.
        """
        memory = find_memory(source, writable=writable)
        address, nbytes, owner = memory.address, memory.nbytes, memory.owner
        if memory.view is not None:
            region = self._native.register_buffer(Region, memory.view, name, writable)
        elif memory.device is not None:
            region = self._native.register_cuda(Region, address, nbytes, memory.device, name, writable, owner)
        else:
            region = self._native.register_address(Region, address, nbytes, name, writable, owner)
        return self._lifetime.adopt(region)

    # ---------------------------------------------------------------- peers

    def connect(self, address: str, timeout: float | None = None) -> Peer:
        """Connect to another engine, prove the cluster secret both ways, and learn its regions.

        Args:
            address: ``"host:port"``, ``"[::1]:7700"``.
            timeout: seconds; None: the setting ``connect_timeout``.

        Raises:
            AddressError: not an address, or the name cannot be resolved.
            ConnectError: refused, unreachable, or no answer in time.
            AuthenticationError: the secrets differ.
            ProtocolError: the other side is no engine; VersionMismatchError: one of another version.
            TransportUnavailableError: the transports of the two sides have nothing in common, or ``require`` cannot be
                met.
        """
        peer: Peer = self._native.connect(Peer, address, timeout)
        peer._tell_of_degradation()
        return peer

    # ---------------------------------------------------------------- transfers

    @overload
    def read(
        self,
        peer: Peer,
        local: Locals,
        remote: RemoteRegion,
        local_offsets: Numbers = 0,
        remote_offsets: Numbers = 0,
        lengths: Numbers | None = None,
        **options: Unpack[TransferOptions],
    ) -> Transfer: ...
    @overload
    def read(self, peer: Peer, local: Iterable[Item], **options: Unpack[TransferOptions]) -> Transfer: ...
    def read(
        self,
        peer: Peer,
        local: Any,
        remote: RemoteRegion | None = None,
        local_offsets: Any = 0,
        remote_offsets: Any = 0,
        lengths: Any = None,
        *,
        deadline: float | None = None,
        deadline_at: float | None = None,
        notify: Buffer | None = None,
        digest: bool = False,
        stream: Any = None,
    ) -> Transfer:
        """Start to copy from regions of `peer` into regions of this engine; return at once.

        Two forms: one pair of regions with offsets and lengths as numbers or arrays, or a list of items
        ``(local, local_offset, remote, remote_offset, length)``. Arrays cost no Python work per item.

        Args:
            peer: where from.
            local: the region to copy into; or ``(regions, which)``, several and for each item the position of its own
                among them, as numbers or an array; or the list of items.
            remote: the region to copy from.
            local_offsets: bytes from the start of `local`. An int for all items, or one per item: a one-dimensional
                integer array or anything with such a buffer (int64 is used in place, others are converted; raw memory
                such as ``bytes`` or a `Region` is refused), or a list.
            remote_offsets: bytes from the start of `remote`, likewise.
            lengths: bytes of each item, likewise. None: all the rest of the source from its offset, which must then be
                an int.
            deadline: seconds from now after which the transfer fails; None: the setting ``deadline``.
            deadline_at: the same as a time of `time.monotonic`; the earlier of both holds. No part of the transfer is
                begun later, even if this process is stopped after it has looked at its own clock: what is under way
                then is under way over connections from before, which `fence` at the peer ends.
            notify: up to 64 KiB that `peer` finds in its `notifications` after the bytes are in place.
            digest: compute a digest of every item at both ends and compare them; see `Transfer.digests`.
            stream: a CUDA stream, as its integer handle or an object with ``cuda_stream`` (``torch.cuda.Stream``): no
                byte is moved before what was queued there up to this call has ended. Needs a local region of a GPU.
                None: the memory is ready.

        Returns:
            The transfer. A bad item gets its own status and does not hinder the others.

        Items move in any order and at the same time. The sources of several may overlap. Where their destinations do,
        each byte is that of one of them, nobody knows which, and with ``digest=True`` those that were overwritten
        before they were compared fail with `Status.DIGEST`.

        Raises:
            MoonpoolError: nothing was started: an argument is wrong (ArgumentTypeError, InvalidArgumentError), or no
                item is good (the exception of the first one: OutOfRangeError, RegionReleasedError, ...).
        """
        if remote is None:
            local = _items(local, local_offsets, remote_offsets, lengths)
        elif lengths is None:
            lengths = _rest(remote, remote_offsets, "remote_offsets")
        return _native.submit(
            self._native, Transfer, peer, _READ, local, remote, local_offsets, remote_offsets, lengths, deadline,
            deadline_at, notify, digest, stream,
        )  # fmt: skip

    @overload
    def write(
        self,
        peer: Peer,
        local: Locals,
        remote: RemoteRegion,
        local_offsets: Numbers = 0,
        remote_offsets: Numbers = 0,
        lengths: Numbers | None = None,
        **options: Unpack[TransferOptions],
    ) -> Transfer: ...
    @overload
    def write(self, peer: Peer, local: Iterable[Item], **options: Unpack[TransferOptions]) -> Transfer: ...
    def write(
        self,
        peer: Peer,
        local: Any,
        remote: RemoteRegion | None = None,
        local_offsets: Any = 0,
        remote_offsets: Any = 0,
        lengths: Any = None,
        *,
        deadline: float | None = None,
        deadline_at: float | None = None,
        notify: Buffer | None = None,
        digest: bool = False,
        stream: Any = None,
    ) -> Transfer:
        """Start to copy from regions of this engine into regions of `peer`; return at once.

        The arguments, result and errors are those of `read`, with the source and the destination exchanged, and so is
        what happens to items that overlap. A write has completed when the bytes are in place at the peer.
        """
        if remote is None:
            local = _items(local, local_offsets, remote_offsets, lengths)
        elif lengths is None:
            lengths = _rest(local, local_offsets, "local_offsets")
        return _native.submit(
            self._native, Transfer, peer, _WRITE, local, remote, local_offsets, remote_offsets, lengths, deadline,
            deadline_at, notify, digest, stream,
        )  # fmt: skip

    @overload
    def prepare(
        self,
        peer: Peer,
        local: Locals,
        remote: RemoteRegion,
        local_offsets: Numbers,
        remote_offsets: Numbers,
        lengths: Numbers,
    ) -> Plan: ...
    @overload
    def prepare(self, peer: Peer, local: Iterable[Item]) -> Plan: ...
    def prepare(
        self,
        peer: Peer,
        local: Any,
        remote: RemoteRegion | None = None,
        local_offsets: Any = 0,
        remote_offsets: Any = 0,
        lengths: Any = None,
    ) -> Plan:
        """Check a batch once, for many posts of all or some of its items in either direction.

        The arguments are those of `read`; `lengths` is needed. The plan does not keep its regions from being
        released: items of released regions fail when they are posted.

        Raises:
            MoonpoolError: an argument is wrong, or one of the items is: a plan is refused as a whole, and the error's
                `item` says which one.
        """
        if remote is None:
            local = _items(local, local_offsets, remote_offsets, lengths)
        elif lengths is None:
            raise InvalidArgumentError("a plan needs lengths", hint="an int, or one per item")
        return _native.prepare(self._native, Plan, peer, local, remote, local_offsets, remote_offsets, lengths)

    def post(
        self,
        plan: Plan,
        indices: Numbers | None = None,
        op: Literal["read", "write"] = "read",
        *,
        deadline: float | None = None,
        deadline_at: float | None = None,
        notify: Buffer | None = None,
        digest: bool = False,
        stream: Any = None,
    ) -> Transfer:
        """Start a transfer of items of a plan; return at once.

        Args:
            plan: from `prepare` of this engine.
            indices: which items, in this order: an integer array, a list, or one int. None: all.
            op: ``"read"``: from the peer; ``"write"``: to the peer.
            deadline: as in `read`.
            deadline_at: as in `read`.
            notify: as in `read`.
            digest: as in `read`.
            stream: as in `read`.

        Returns:
            The transfer. Its item ``i`` is the item ``indices[i]`` of the plan.

        Raises:
            MoonpoolError: as `read` does. An index outside the plan is a bad item.
        """
        return _native.post(
            self._native, Transfer, plan, _op_number(op), indices, deadline, deadline_at, notify, digest, stream
        )

    def notifications(self, timeout: float = 0.0) -> list[Notification]:
        """Take the notifications that peers have sent, the oldest first.

        Args:
            timeout: seconds to wait for the first one; 0 does not wait.

        Returns:
            Those that are there, at most ``notifications_max``; an empty list when none came in time.

        Raises:
            ClosedError: the engine was closed.
        """
        taken: list[Notification] = []
        while len(taken) < self._settings.notifications_max:
            notification = self._native.take_notification(0.0 if taken else timeout)
            if notification is None:
                break
            taken.append(Notification(*notification))
        return taken

    def fence(self, incarnation: str) -> int:
        """Cut off a peer that connected to this engine: its lanes, its queue pairs, the memory that it has mapped.

        When it returns, nothing that the peer had begun writes memory of this engine any more, and no read of it
        completes. Whoever gives space to somebody else after a deadline of its own, fences the one who had it first.
        The peer may connect again; its engine does so by itself with the next transfer.

        Args:
            incarnation: of the peer's engine, 32 hexadecimal digits, as `TransferEngine.incarnation` has it there and
                `Notification.incarnation` here.

        Returns:
            How many connections it had; 0 when it had none.

        Raises:
            InvalidArgumentError: `incarnation` is not 32 hexadecimal digits.
            RegionBusyError: it is cut off, but its process on this host was stopped in the middle of a copy.
            ClosedError: the engine was closed.
        """
        if not isinstance(incarnation, str):
            raise ArgumentTypeError(f"incarnation is a {type(incarnation).__name__}", hint="a str")
        if re.fullmatch("[0-9a-fA-F]{32}", incarnation) is None:
            raise InvalidArgumentError(
                f"{incarnation!r} is no incarnation", hint="32 hexadecimal digits, such as Notification.incarnation"
            )
        return self._native.fence(bytes.fromhex(incarnation))

    # ---------------------------------------------------------------- state

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges: bytes, operations and errors per path, peers, lanes, regions, notifications.

        They can be read after `close` too, as can the states of peers and transfers.
        """
        stats: dict[str, Any] = json.loads(self._native.stats_json())
        return stats

    def close(self) -> None:
        """End every transfer, connection and thread of the engine, and let go of all registered memory.

        Transfers in flight fail with `ClosedError`. Calling it again does nothing; a concurrent call returns when the
        engine is closed. Views of allocated regions stay valid.
        """
        self._lifetime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a TransferEngine cannot be copied or pickled", hint="an engine of its own in each process"
        )

    def __repr__(self) -> str:
        where = f"at {self.address}" if self.address else "not listening"
        state = "closed" if self.closed else f"{len(self._lifetime.regions)} regions"
        return f"<TransferEngine {self.name!r} {where}, {state}>"


def _rest(source: Region | RemoteRegion, offset: Any, what: str) -> int:
    """Return the bytes of `source` from `offset` on. Not positive when there are none: the core refuses that."""
    if not isinstance(source, (Region, RemoteRegion)):
        raise ArgumentTypeError(
            f"a {type(source).__name__} is no region", hint="engine.allocate(), engine.register() or peer.regions[name]"
        )
    try:
        start = operator.index(offset)
    except TypeError:
        raise InvalidArgumentError(
            f"lengths is None and {what} is not an int", hint="lengths as an int, or one per item"
        ) from None
    return source.nbytes - start


def _items(local: Any, local_offsets: Any, remote_offsets: Any, lengths: Any) -> list[Any]:
    if isinstance(local, Region):
        raise ArgumentTypeError("remote is missing", hint="peer.regions['name'] as the third argument")
    if any(not isinstance(value, int) or value for value in (local_offsets, remote_offsets)) or lengths is not None:
        raise InvalidArgumentError(
            "offsets or lengths were given beside a list of items",
            hint="each item as (local, offset, remote, offset, length)",
        )
    try:
        return list(local)
    except TypeError:
        raise ArgumentTypeError(
            f"local is a {type(local).__name__}",
            hint="a Region, or a list of items (local, local_offset, remote, remote_offset, length)",
        ) from None


def _op_number(op: object) -> int:
    if not isinstance(op, str):
        raise ArgumentTypeError(f"op is a {type(op).__name__}", hint="'read' or 'write'")
    if op == "read":
        return _READ
    if op == "write":
        return _WRITE
    raise InvalidArgumentError(f"op is {op!r}", hint="'read' or 'write'")


def _calling_place() -> Place:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)
