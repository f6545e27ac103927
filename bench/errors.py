# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a measurement, and the exit status of each kind."""

from __future__ import annotations

from enum import IntEnum

from moonpool.errors import MoonpoolError

__all__ = ["BenchError", "ControlError", "ExitStatus", "TargetError", "UsageError", "VerificationError"]


class ExitStatus(IntEnum):
    """The exit status of ``mooncake-bench``, the same on both sides of a run."""

    OK = 0
    #: Bytes differed on either side.
    NOT_VERIFIED = 1
    #: The command line cannot be carried out.
    USAGE = 2
    #: A transfer, a limit or the other process failed.
    FAILED = 3
    INTERRUPTED = 130


class BenchError(MoonpoolError, RuntimeError):
    """A measurement could not be made."""

    default_code = "BENCH"


class UsageError(MoonpoolError, ValueError):
    """The options of a command do not fit together."""

    default_code = "USAGE"


class ControlError(BenchError):
    """The other process of the benchmark is gone, silent, or not the benchmark."""

    default_code = "BENCH_CONTROL"


class TargetError(BenchError):
    """The other process of the benchmark reports a failure of its own."""

    default_code = "BENCH_TARGET"


class VerificationError(BenchError):
    """Bytes are not what was sent."""

    default_code = "BENCH_VERIFICATION"
