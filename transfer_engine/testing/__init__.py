# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, for the tests of programs that use the engine, and for the engine's own.

`FaultProxy` stands between two engines and is a bad network: it stalls, cuts, delays, corrupts and reorders, when it is
told to or by rules and a seed. `FaultyEngine` is an engine whose transports, whichever they are, lose, delay, refuse
and spoil some of its transfers.
"""

from moonpool.transfer_engine.testing.faults import Faults, FaultsMade, FaultyEngine
from moonpool.transfer_engine.testing.proxy import FaultProxy
from moonpool.transfer_engine.testing.rules import Corrupt, Cut, Delay, Refuse, Reorder, Rule

__all__ = [
    "Corrupt",
    "Cut",
    "Delay",
    "FaultProxy",
    "Faults",
    "FaultsMade",
    "FaultyEngine",
    "Refuse",
    "Reorder",
    "Rule",
]
