# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this suite."""

from master_testing.fixtures import join, start_master

__all__ = ["join", "start_master"]
