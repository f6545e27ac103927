# SPDX-License-Identifier: Apache-2.0
"""An engine whose transports misbehave: what a program does when transfers are late, lost, refused or spoilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool import _native
from moonpool.transfer_engine.engine import TransferEngine
from moonpool.transfer_engine.errors import ArgumentTypeError, ConfigError, Status
from moonpool.transfer_engine.testing.rules import ends, is_number, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moonpool.transfer_engine.settings import EngineOptions, EngineSettings
    from moonpool.transfer_engine.testing.rules import Seconds

__all__ = ["Faults", "FaultsMade", "FaultyEngine"]

_DELAY_MAX = 3600.0
_PROBABILITIES = ("delay", "drop", "error", "partial", "partial_share", "corrupt")
#: What a call ends with, and no transfer.
_NO_FAILURES = (Status.OK, Status.PENDING, Status.WAIT_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to the transfers that an engine submits. Probabilities are of each transfer, from 0 to 1.

    Whatever happens, a transfer keeps its contract: it ends in one state with a status per item, owns its buffers until
    it is settled, and no notification is delivered when bytes did not arrive.

    Attributes:
        seed: of every choice. Every draw comes from one sequence of random numbers: which transfers meet a fault
            depends on the order in which they are submitted and on the other faults too.
        delay: probability that a transfer is begun later.
        delay_seconds: how much later: a number, or a range that the seed draws from.
        drop: that it is never answered. It ends by its deadline, by `Transfer.cancel`, or when its peer or engine is
            closed.
        error: that it fails as a whole, and nothing of it is moved.
        error_status: what it fails with.
        partial: that some of its pieces fail (what adjacent items merge into, and a large item is cut into) and the
            others are moved.
        partial_share: the probability of each piece; one fails in any case.
        partial_status: what they fail with. `BatchError` is raised for the statuses that concern single items.
        corrupt: that one bit of the bytes that arrive is wrong. With ``digest=True`` its item fails with
            `Status.DIGEST`; without, nobody is told.

    Raises:
        ConfigError: an impossible value.
    """

    seed: int = 0
    delay: float = 0.0
    delay_seconds: Seconds = (0.001, 0.01)
    drop: float = 0.0
    error: float = 0.0
    error_status: Status = Status.PEER_LOST
    partial: float = 0.0
    partial_share: float = 0.5
    partial_status: Status = Status.REGION_UNKNOWN
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        given = vars(self)
        seed = given["seed"]
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed is {shown(seed)}", hint="an int from 0 to 2**64 - 1")
        for name in _PROBABILITIES:
            value = given[name]
            if not is_number(value) or not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is {shown(value)}", hint="a probability: a number from 0 to 1")
        for name in ("error_status", "partial_status"):
            status = given[name]
            if not isinstance(status, Status) or status in _NO_FAILURES:
                raise ConfigError(f"{name} is {shown(status)}", hint="a Status that a transfer fails with")
        if ends(self.delay_seconds, _DELAY_MAX) is None:
            raise ConfigError(
                f"delay_seconds is {shown(self.delay_seconds)}",
                hint="seconds from 0 to an hour: a number, or (shortest, longest)",
            )

    def native_arguments(self) -> dict[str, Any]:
        """Return the faults as ``mp_faults`` takes them."""
        given = self.delay_seconds
        shortest, longest = given if isinstance(given, tuple) else (given, given)
        numbers = {name: float(vars(self)[name]) for name in _PROBABILITIES}
        return {
            **numbers,
            "seed": self.seed,
            "delay_min_us": round(shortest * 1e6),
            "delay_max_us": round(longest * 1e6),
            "error_status": int(self.error_status),
            "partial_status": int(self.partial_status),
        }


class FaultsMade(NamedTuple):
    """How many transfers met each fault."""

    delayed: int
    dropped: int
    failed: int
    partial: int
    corrupted: int


class FaultyEngine(TransferEngine):
    """A `TransferEngine` whose own transfers meet faults. What peers do with its regions is not touched.

    ::

        with FaultyEngine(Faults(seed=1, drop=0.01, corrupt=0.001), "decode-0") as engine:
            ...

    Args:
        faults: what happens, until `set_faults`.
        name: as of `TransferEngine`.
        settings: as of `TransferEngine`.
        options: as of `TransferEngine`.
    """

    def __init__(
        self,
        faults: Faults,
        name: str | None = None,
        *,
        settings: EngineSettings | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._faults = _checked(faults)
        super().__init__(name, settings=settings, **options)

    def _open(self, arguments: dict[str, Any]) -> _native.Engine:
        self._faulty = _native.FaultyEngine(self._faults.native_arguments(), **arguments)
        return self._faulty

    @property
    def faults(self) -> Faults:
        """The faults in force."""
        return self._faults

    def set_faults(self, faults: Faults) -> None:
        """Change them for the transfers that are submitted from now on, beginning anew with the seed."""
        self._faulty.set_faults(_checked(faults).native_arguments())
        self._faults = faults

    def faults_made(self) -> FaultsMade:
        """Return how many transfers met each fault since the engine was opened."""
        return FaultsMade(*self._faulty.faults_made())


def _checked(faults: object) -> Faults:
    if not isinstance(faults, Faults):
        raise ArgumentTypeError(f"faults is a {type(faults).__name__}", hint="Faults(seed=1, drop=0.01)")
    return faults
