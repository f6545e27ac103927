# SPDX-License-Identifier: Apache-2.0
"""Prompts that share nothing, unless they are made to."""

from __future__ import annotations

import random
from typing import Any

from vllm_testing.models import VOCABULARY

__all__ = ["prompt"]


def prompt(tokens: int, *name: Any, after: list[int] | None = None) -> list[int]:
    """Return so many tokens, others for each name, behind those of `after`."""
    chance = random.Random(repr(name))
    return [*(after or []), *(chance.randrange(3, VOCABULARY) for _ in range(tokens))]
