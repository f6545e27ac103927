# SPDX-License-Identifier: Apache-2.0
"""Tests that run inside the emulated machine, and what they share."""
