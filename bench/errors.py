# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a measurement, and the exit status of each kind."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from moonpool.errors import MoonpoolError

__all__ = [
    "AGAIN",
    "NO_LIMIT",
    "BenchError",
    "ControlError",
    "ExitStatus",
    "TargetError",
    "TraceError",
    "UsageError",
    "VerificationError",
]

#: The code of an error that says why a row has nothing to be compared with, though the engine can be measured.
NO_LIMIT: Final = "BENCH_NO_LIMIT"
#: The code of an error after which the same run may well succeed.
AGAIN: Final = "BENCH_AGAIN"


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


class TraceError(MoonpoolError, ValueError):
    """A trace cannot be read, or has something in it that is no request."""

    default_code = "BENCH_TRACE"


class VerificationError(BenchError):
    """Bytes are not what was sent."""

    default_code = "BENCH_VERIFICATION"
