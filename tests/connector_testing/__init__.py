# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, stepped without an engine: a pool and workers that are made up, and content that is checked."""

from __future__ import annotations

import warnings

import pytest

__all__ = ["THEIR_WARNINGS", "need_vllm"]

#: For tests in which vLLM imports more of itself.
THEIR_WARNINGS = [
    pytest.mark.filterwarnings(f"default::{name}")
    for name in ("DeprecationWarning", "FutureWarning", "UserWarning", "RuntimeWarning")
]


def need_vllm() -> None:
    """Import what steps a scheduler, or skip the module."""
    with warnings.catch_warnings():
        # vLLM, torch and what they use warn of themselves.
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed, and its scheduler is stepped here")
        import vllm.v1.core.sched.scheduler
        import vllm.v1.engine.core  # noqa: F401 - all that an engine imports
