# SPDX-License-Identifier: Apache-2.0
"""Tests that run inside the emulated machine, and what they share."""

from pathlib import Path
from typing import Final

#: The stand-in for libcuda.
CUDA: Final = Path("/lab/cuda/libcuda.so.1")
