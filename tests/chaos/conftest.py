# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this suite."""

from engine_testing.fixtures import no_leaks, open_engine, open_pair, pair, transport

__all__ = ["no_leaks", "open_engine", "open_pair", "pair", "transport"]
