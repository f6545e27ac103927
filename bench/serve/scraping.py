# SPDX-License-Identifier: Apache-2.0
"""What a server counts itself: where the tokens of its prompts came from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Tiers", "counted", "difference", "tiers"]

#: As vLLM names them, without ``_total``.
_LOCAL_QUERIES: Final = "vllm:prefix_cache_queries"
_LOCAL_HITS: Final = "vllm:prefix_cache_hits"
_EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits"
_BY_SOURCE: Final = "vllm:prompt_tokens_cached_by_source"
_OF_VLLM: Final = frozenset(
    {
        _LOCAL_QUERIES,
        _LOCAL_HITS,
        "vllm:external_prefix_cache_queries",
        _EXTERNAL_HITS,
        _BY_SOURCE,
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:num_preemptions",
    }
)
#: Which engine or model of a server it was is summed up.
_SUMMED: Final = frozenset({"engine", "model_name"})
#: Counters that are kept. A page with more has labels that nobody should have.
_COUNTERS_MAX: Final = 512

_LINE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\s*")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Tiers:
    """Where the tokens of prompts came from.

    Attributes:
        queried: tokens of all prompts.
        hits: those that were not computed, by where they were: ``device`` is the server's own cache, the others are
            behind its KV connector.
    """

    queried: float
    hits: dict[str, float]

    def ratio(self, tier: str) -> float | None:
        """Return the part of the tokens that came from a tier."""
        return self.hits.get(tier, 0.0) / self.queried if self.queried else None

    def __add__(self, other: Tiers) -> Tiers:
        names = dict.fromkeys([*self.hits, *other.hits])
        return Tiers(
            self.queried + other.queried,
            {name: self.hits.get(name, 0.0) + other.hits.get(name, 0.0) for name in names},
        )


def counted(page: str) -> dict[str, float]:
    """Return what a page of metrics counts of vLLM's prefix caches, and of Moonpool.

    Args:
        page: in the text format of Prometheus; lines that are none are passed over.

    Returns:
        Values by name, without ``_total`` and with those labels in braces that tell tiers or the like apart.
    """
    values: dict[str, float] = {}
    for line in page.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name = match[1].removesuffix("_total")
        counter = name != match[1] or name.endswith(("_sum", "_count"))
        if not counter or (name not in _OF_VLLM and "moonpool" not in name):
            continue
        labels = ",".join(
            f'{label}="{value}"' for label, value in sorted(_LABEL.findall(match[2] or "")) if label not in _SUMMED
        )
        key = f"{name}{{{labels}}}" if labels else name
        value = _number(match[3])
        if value is not None and (key in values or len(values) < _COUNTERS_MAX):
            values[key] = values.get(key, 0.0) + value
    return values


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Return by how much each has grown; None where one has shrunk: the server is not the same any more."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return None if any(value < 0 for value in grown.values()) or before.keys() - after.keys() else grown


def tiers(grown: Mapping[str, float]) -> Tiers | None:
    """Return where tokens came from; None where the server does not count that."""
    if _LOCAL_QUERIES not in grown:
        return None
    hits = {
        labels[0][1]: value
        for key, value in grown.items()
        if key.startswith(f"{_BY_SOURCE}{{") and (labels := _LABEL.findall(key)) and labels[0][0] == "source"
    }
    if not hits:
        # Before vLLM told sources apart.
        hits = {"device": grown.get(_LOCAL_HITS, 0.0), "external": grown.get(_EXTERNAL_HITS, 0.0)}
    if "external_unspecified" in hits:
        hits["external"] = hits.pop("external_unspecified")
    return Tiers(grown[_LOCAL_QUERIES], hits)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
