# SPDX-License-Identifier: Apache-2.0
"""The variables that make vLLM run here, which have to be there before it is imported."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["VARIABLES", "prepare"]

VARIABLES: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The core runs in the thread of the test, which can look into it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Tests share the cores of the machine, so no process takes one for itself.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prepare() -> None:
    """Set in this process what is not set."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
