# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with what a node lends."""

from __future__ import annotations

from moonpool.errors import MoonpoolError

__all__ = ["DiskError"]


class DiskError(MoonpoolError, OSError):
    """The disk of a node cannot be used: the file is in use or is none of ours, or the system refuses it."""

    default_code = "DISK"
