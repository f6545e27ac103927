# SPDX-License-Identifier: Apache-2.0
"""Other engines that this one is connected to, and the regions they offer."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from moonpool import _native
from moonpool.transfer_engine.errors import ArgumentTypeError, ForkedError, RegionNotFoundError
from moonpool.transfer_engine.regions import RemoteRegion

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Peer", "PeerState", "RemoteRegions"]

_log = logging.getLogger("moonpool.transfer_engine")
# Where the peer is, or that it has no memory of GPUs, which is nobody's fault.
_PLACES = frozenset(
    {
        "local: the peer is another process",
        "shm: the peer is on another host",
        "cuda_ipc: the peer is in this process",
        "cuda_ipc: the peer is on another host",
        "cuda_ipc: the peer does not offer it",
    }
)
# How many names an error message lists before it only counts them.
_NAMES_SHOWN = 8


class PeerState(enum.IntEnum):
    """What is known about the connection. The numbers are those of ``mp_peer_state``."""

    CONNECTING = 0
    READY = 1
    LOST = 2
    CLOSED = 3


class _Info(NamedTuple):
    state: int
    incarnation: str
    name: str
    address: str
    path: str
    fallback: str
    regions: int


def degradation(fallback: str) -> str:
    """Return what is left of `Peer.fallback` without the reasons that only say where the peer is."""
    return "; ".join(reason for reason in fallback.split("; ") if reason not in _PLACES)


class Peer(_native.Peer):
    """A connection to another engine, made by `TransferEngine.connect`.

    A peer that is lost is not gone: the next transfer, or `ensure`, connects again. A peer process that was restarted
    comes back with another `incarnation`, and handles on regions of the earlier one are refused.

    A context manager that closes the connection. Thread-safe.
    """

    __slots__ = ("__weakref__", "_told")

    _told: str

    def __init__(self) -> None:
        raise ArgumentTypeError("a Peer cannot be made directly", hint="engine.connect('host:port')")

    @property
    def name(self) -> str:
        """The name the peer gave itself."""
        return _Info(*self._info()).name

    @property
    def address(self) -> str:
        """The ``host:port`` it was connected by."""
        return _Info(*self._info()).address

    @property
    def incarnation(self) -> str:
        """The random identity of the peer's engine in the present connection, 32 hexadecimal digits."""
        return _Info(*self._info()).incarnation

    @property
    def path(self) -> str:
        """The transport that would carry the next transfer of host memory: "local", "shm", "rdma" or "tcp".

        From GPU to GPU of one host it is ``"cuda_ipc"`` where that works: ``engine.stats()["paths"]`` counts what each
        has carried.

        Empty while none would: the peer is not connected, or no path that `require` leaves can be used. While every
        RDMA port of a side is down it is another one than ``"rdma"``, and ``"rdma"`` again when a port is back. A
        transfer that this path cannot take, such as one with digests over RDMA, goes over the next one.
        """
        return _Info(*self._info()).path

    @property
    def fallback(self) -> str:
        """Why transports would not be used that are cheaper than `path`; empty when there is none.

        Up to 255 bytes, for people: ``"local: the peer is another process; shm: the peer is on another host"``.

        When `TransferEngine.connect` or `ensure` returns, a reason that says more than where the peer is goes to the
        logger ``moonpool.transfer_engine`` as a warning, once.
        """
        return _Info(*self._info()).fallback

    @property
    def state(self) -> PeerState:
        """What is known about the connection now."""
        return PeerState(_Info(*self._info()).state)

    @property
    def regions(self) -> RemoteRegions:
        """The named regions the peer offers: a mapping from name to `RemoteRegion`."""
        # Made anew each time: a peer that kept it would be a cycle, and would live until the garbage collector runs.
        return RemoteRegions(self)

    def ensure(self, timeout: float | None = None) -> None:
        """Make sure that the peer is connected; connect again if it was lost.

        Args:
            timeout: seconds; None: the engine's ``connect_timeout``.

        Raises:
            ConnectError: it cannot be reached in time.
            AuthenticationError: the cluster secrets differ.
            ClosedError: the peer or its engine was closed.
        """
        self._ensure(timeout)
        self._tell_of_degradation()

    def close(self) -> None:
        """End the connection. Transfers that are running fail with `ClosedError`. Calling it again does nothing.

        Nor does calling it in a forked child: the connection is the parent's.
        """
        self._close()

    def _tell_of_degradation(self) -> None:
        info = _Info(*self._info())
        reason = degradation(info.fallback)
        if reason and reason != getattr(self, "_told", ""):
            _log.warning("peer %r at %s is reached over %s, not as cheaply as could be: %s", *info[2:5], reason)
        self._told = reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a Peer cannot be copied or pickled", hint="engine.connect(peer.address) in the other process"
        )

    def __repr__(self) -> str:
        try:
            info = _Info(*self._info())
        except ForkedError:
            return "<Peer of the process that forked this one>"
        state = PeerState(info.state).name.lower()
        path = f" over {info.path}" if info.path else ""
        return f"<Peer {info.name!r} at {info.address}{path}, {state}, {info.regions} regions>"


class RemoteRegions(Mapping[str, RemoteRegion]):
    """The named regions that a peer has announced so far. Looking one up asks nothing over the network.

    Iteration gives the names in order. Thread-safe.
    """

    __slots__ = ("_peer",)

    def __init__(self, peer: _native.Peer) -> None:
        self._peer = peer

    def __getitem__(self, name: str) -> RemoteRegion:
        """Return the region.

        Raises:
            RegionNotFoundError: the peer has announced no region of this name; the hint names the nearest.
        """
        return self.wait(name, 0.0)

    def wait(self, name: str, timeout: float = 60.0) -> RemoteRegion:
        """Return the region, waiting until the peer has announced it.

        Args:
            name: the name its owner gave it.
            timeout: seconds.

        Raises:
            RegionNotFoundError: it was not announced in time.
            ClosedError: the peer or its engine was closed.
        """
        try:
            return self._peer._find_region(RemoteRegion, name, timeout)
        except RegionNotFoundError as error:
            error.hint = self._suggest(name)
            raise

    def __iter__(self) -> Iterator[str]:
        return iter([region.name for region in self._peer._list_regions(RemoteRegion)])

    def __len__(self) -> int:
        return _Info(*self._peer._info()).regions

    def __repr__(self) -> str:
        return f"<RemoteRegions of {self._peer!r}>"

    def _suggest(self, name: str) -> str:
        # Imported late: difflib is slow to load and only mistakes need it.
        import difflib

        names = list(self)
        if not names:
            return "peer.regions.wait(name, timeout), if it is to come: the peer has announced no named region yet"
        nearest = difflib.get_close_matches(name, names, n=1)
        if nearest:
            return repr(nearest[0])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return "one of " + ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
