# SPDX-License-Identifier: Apache-2.0
"""What a way of moving blocks has to offer to be measured.

An engine and a limit are the same kind of thing here: a `Backend` makes, for one row, a target side that is ready to
be read and written and an initiating side that runs transfers for a given time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moonpool.bench.gpu.memory import GpuMemory
    from moonpool.bench.measure import Window
    from moonpool.bench.work import Layout, Work

__all__ = ["Backend", "InitiatorSide", "Place", "RowSide", "TargetSide"]


@dataclass(frozen=True)
class Place:
    """Where the two sides meet.

    Attributes:
        host: the target's address: to listen on, or to reach it by.
        secret: both sides prove that they know it.
        insecure: allow listening beyond loopback without a secret.
        engine_port: where the target's engine listens; 0 picks a port.
        limit_port: where the target's raw sockets listen; 0 picks a port.
        timeout: seconds that a single step of either side may take.
    """

    host: str = "127.0.0.1"
    secret: bytes | None = field(default=None, repr=False)
    insecure: bool = False
    engine_port: int = 0
    limit_port: int = 0
    timeout: float = 10.0


@dataclass(frozen=True)
class RowSide:
    """One side of a row.

    Attributes:
        work: what is moved.
        local: the places of the blocks on this side.
        remote: their places on the other side.
        memory: this side's memory, the same array for all rows that share it.
        mode: what a limit waits for: ``acked`` or ``stream``.
        width: connections or copying threads a limit may use; 0: what suits it.
        gpu: the memory that is moved where it is a GPU's; `memory` is its image. None: it is `memory`.
    """

    work: Work
    local: Layout
    remote: Layout
    memory: NDArray[np.uint8]
    mode: str
    width: int
    gpu: GpuMemory | None = None


class TargetSide(ABC):
    """The side that is read and written."""

    #: What the initiating side needs to know. Crosses the control connection as JSON, except within one process.
    offer: dict[str, Any]

    def arm(self, order: dict[str, Any]) -> None:  # noqa: B027 - most targets are always ready
        """Get ready for one run of the initiating side.

        Args:
            order: what that side said about it; see `InitiatorSide.order`.
        """

    def finish(self) -> None:  # noqa: B027
        """Return when everything `arm` started has ended.

        Raises:
            BenchError: it ended badly.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what belongs to this row."""


class PassiveTarget(TargetSide):
    """A target that has nothing to do but to say what the initiating side needs: its memory is reached without it."""

    def __init__(self, offer: dict[str, Any]) -> None:
        self.offer = offer

    def close(self) -> None:
        """Let go of what was offered."""
        self.offer = {}


class InitiatorSide(ABC):
    """The side that runs transfers."""

    def __init__(self, threads: int) -> None:
        #: The next batch of each thread; `run` goes on from there.
        self.next_batch: array[int] = array("Q", [0] * threads)
        #: Not 0: end between two transfers.
        self.stop: array[int] = array("i", [0])

    @property
    def width(self) -> int | None:
        """Connections in use, or None where there are none."""
        return None

    @property
    def path(self) -> str | None:
        """The way the bytes take, such as ``shm``, or None where the backend does not tell."""
        return None

    @property
    def fallback(self) -> str:
        """Why the bytes take no cheaper way, or ``""``."""
        return ""

    @property
    def rail_bytes(self) -> dict[str, int] | None:
        """Bytes that each RDMA rail of this side has carried for the row, or None where there are no rails."""
        return None

    def order(self, seconds: float) -> dict[str, Any]:
        """Return what the target has to know ahead of a run of so many seconds, as JSON values."""
        return {}

    @abstractmethod
    def run(self, seconds: float) -> Window:
        """Run transfers for so long, at least one per thread, and return what completed.

        Called by one thread; `stop` and `abort` may be used from another.
        """

    def abort(self) -> None:  # noqa: B027 - where `stop` is seen soon enough nothing more is needed
        """End a running `run` at once, perhaps with an error; this side is of no use afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Give back what belongs to this row."""


class Backend(ABC):
    """One way to move the blocks of a work. Lives as long as the process takes part in a run."""

    #: What the table and the JSON form call it.
    name: ClassVar[str]

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    def environment(cls, transport: str) -> dict[str, str]:
        """Return the environment variables its two processes need, where it has processes of its own."""
        return {}

    def memory(self, work: Work, *, target: bool) -> NDArray[np.uint8] | None:
        """Return memory of its own for one side of a row, or None: any will do.

        Rows that ask for the same length get the same array. It is valid until the backend is closed or asked for
        other memory.
        """
        return None

    def version(self) -> str | None:
        """Return the version of what is measured where it is not part of this project."""
        return None

    @abstractmethod
    def target(self, row: RowSide) -> TargetSide:
        """Make the target side of a row."""

    @abstractmethod
    def initiator(self, row: RowSide, offer: dict[str, Any]) -> InitiatorSide:
        """Make the initiating side of a row, connected to the target side that made `offer`."""

    def close(self) -> None:  # noqa: B027 - not every backend keeps something over rows
        """Give back everything."""
