# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake-bench serve`` shows, and its JSON form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moonpool.bench.jsonform import rounded
from moonpool.bench.report import digits, fitted, header
from moonpool.bench.serve.contest import Variant
from moonpool.bench.serve.figures import Gain, samples, spread
from moonpool.bench.serve.summary import Summary, summaries

__all__ = ["document", "print_report", "trouble"]

#: Changed when a key disappears or changes its meaning; new keys do not change it.
_SCHEMA: Final = 1
_NONE: Final = "–"
#: From here on it is worth a word that requests are late.
_LATE_S: Final = 0.05
_LEGEND: Final = """\
Times in ms, over all requests that were answered. TTFT: from sending a request to its first token; ITL: between parts
of an answer with tokens; req/s and tok/s (of answers): medians over the rounds.{tiers}"""
_TIERS: Final = """
cached: part of the prompts' tokens that was not computed, by where it was, as the server counts."""
_GAINS: Final = {
    "ttft_p50": "TTFT p50",
    "later_ttft_p50": "of later turns",
    "ttft_p99": "TTFT p99",
    "tpot_p50": "per token",
    "e2e_p50": "whole answer",
    "output_tokens_per_s": "tok/s",
}


def print_report(
    console: Console, environment: dict[str, Any], variants: Sequence[Variant], *, workload: str, run: str
) -> None:
    """Print the header, the table, the turns, and how the servers compare."""
    parts = summaries(variants)
    console.print(header(environment, [("asked", workload)], run=run), "", sep="\n")
    # Tiers that no server has are left out.
    tiers = sorted({tier for part in parts for tier in part.hit_ratios if tier == "device" or part.hit_tokens[tier]})
    fitted(console, _table(parts, tiers))
    if (turns := max(len(part.turns) for part in parts)) > 1:
        console.print("")
        fitted(console, _turns_table(parts, turns))
    console.print("", Text(_LEGEND.format(tiers=_TIERS if tiers else ""), style="dim"), sep="\n")
    if compared := [part for part in parts if part.gains]:
        console.print("")
        for part in compared:
            console.print(Text(_in_short(parts[0].name, part)), soft_wrap=True)
    for text in trouble(variants):
        console.print(Text(text, style="yellow"), soft_wrap=True)


def trouble(variants: Sequence[Variant]) -> list[str]:
    """Return what went wrong, a line for each kind and server."""
    texts: list[str] = []
    for variant in variants:
        rounds = variant.rounds.values()
        details = {kind: text for one in reversed(list(rounds)) for kind, text in one.details.items()}
        failures: Counter[str] = sum((one.failures for one in rounds), Counter())
        texts.extend(
            f"failed: {variant.name}: {kind}: {count:,} times; first: {details[kind]}"
            for kind, count in sorted(failures.items())
        )
        if dropped := sum(one.dropped for one in rounds):
            texts.append(f"not sent: {variant.name}: {dropped:,} requests, because what they follow failed")
        if stand_ins := sum(one.stand_ins for one in rounds):
            texts.append(
                f"note: {variant.name} does not tell the tokens of its answers: in later turns others stand in for "
                f"{stand_ins:,} answers, which no cache has"
            )
        if any(one.grown is None for one in rounds):
            texts.append(f"note: {variant.name} has no /metrics that count: hits by tier are not known for all rounds")
        late = spread(samples(list(rounds), lambda asked: asked.late_s).values)["p99"]
        if late is not None and late > _LATE_S:
            texts.append(
                f"note: requests to {variant.name} were sent up to {late * 1e3:.0f} ms (p99) after their time: "
                "this host does not keep up, and times are of it as well"
            )
        if variant.gone:
            texts.append(f"given up: {variant.name}: {variant.gone}")
    return texts


def _table(parts: Sequence[Summary], tiers: Sequence[str]) -> Table:
    table = _empty_table()
    titles = ["\nserver", "\nrequests", "\nfailed", "\nreq/s", "\ntok/s", "TTFT\np50", "\np90", "\np99", "ITL\np50"]
    for title in [*titles, "\np99", "answer\np50", "\np99", *_tier_titles(tiers)]:
        table.add_column(title, justify="left" if title == titles[0] else "right", no_wrap=True)
    for part in parts:
        failed = part.failed + part.dropped
        table.add_row(
            part.name,
            f"{part.requests:,}",
            Text(f"{failed:,}", style="bold red" if failed else ""),
            digits(part.requests_per_s),
            digits(part.output_tokens_per_s),
            *(_ms(part.ttft[q]) for q in ("p50", "p90", "p99")),
            *(_ms(part.itl[q]) for q in ("p50", "p99")),
            *(_ms(part.e2e[q]) for q in ("p50", "p99")),
            *(_percent(part.hit_ratios.get(tier)) for tier in tiers),
        )
    return table


def _tier_titles(tiers: Sequence[str]) -> list[str]:
    return [f"{'cached' if number == 0 else ''}\n{tier}" for number, tier in enumerate(tiers)]


def _turns_table(parts: Sequence[Summary], turns: int) -> Table:
    """Time to the first token by turn, and how the first server compares."""
    table = _empty_table()
    table.add_column("TTFT of\nturn", justify="right", no_wrap=True)
    for number, part in enumerate(parts):
        for title in (f"{part.name}\np50", "\np99", "\nprompt", *(["\ntimes"] if number else [])):
            table.add_column(title, justify="right", no_wrap=True)
    for turn in range(turns):
        cells = [str(turn + 1)]
        for number, part in enumerate(parts):
            one = part.turns[turn] if turn < len(part.turns) else None
            cells.extend([_ms(one.ttft["p50"]), _ms(one.ttft["p99"])] if one else [_NONE, _NONE])
            cells.append(f"{one.prompt_tokens:,.0f}" if one and one.prompt_tokens is not None else _NONE)
            if number:
                cells.append(digits(one.gain.value) if one and one.gain else _NONE)
        table.add_row(*cells)
    return table


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def _in_short(first: str, part: Summary) -> str:
    told = [
        f"{title} {digits(gain.value)}{_interval(gain)}"
        for name, title in _GAINS.items()
        if (gain := part.gains.get(name))
    ]
    return f"{first} against {part.name}, times better (95 % interval): {', '.join(told)}"


def _interval(gain: Gain) -> str:
    return "" if gain.low is None or gain.high is None else f" ({digits(gain.low)} to {digits(gain.high)})"


def _ms(seconds: float | None) -> str:
    return digits(None if seconds is None else seconds * 1e3)


def _percent(part: float | None) -> str:
    return _NONE if part is None else f"{part * 100:.1f} %"


def document(
    environment: dict[str, Any], variants: Sequence[Variant], *, workload: dict[str, Any], seed: int, interrupted: bool
) -> dict[str, Any]:
    """Return the whole run."""
    parts = summaries(variants)
    return {
        "schema": _SCHEMA,
        "environment": environment,
        "workload": workload,
        "seed": seed,
        "interrupted": interrupted,
        "reference": variants[0].name,
        "variants": [_variant(variant, part) for variant, part in zip(variants, parts, strict=True)],
    }


def _variant(variant: Variant, part: Summary) -> dict[str, Any]:
    rounds = [variant.rounds[number] for number in sorted(variant.rounds)]
    return {
        "name": variant.name,
        "model": variant.model,
        "rounds": len(rounds),
        "requests": part.requests,
        "failed": part.failed,
        "dropped": part.dropped,
        "failures": dict(sorted(sum((one.failures for one in rounds), Counter[str]()).items())),
        "gone": variant.gone or None,
        "stand_ins": sum(one.stand_ins for one in rounds),
        "seconds": rounded(sum(one.seconds for one in rounds)),
        "requests_per_s": rounded(part.requests_per_s),
        "output_tokens_per_s": rounded(part.output_tokens_per_s),
        "prompt_tokens": part.prompt_tokens,
        "output_tokens": sum(one.output_tokens for one in rounds),
        "cached_tokens": part.cached_tokens,
        "queried_tokens": part.queried_tokens,
        "hit_tokens": part.hit_tokens,
        "hit_ratios": {tier: rounded(ratio) for tier, ratio in part.hit_ratios.items()},
        "ttft_ms": _times(part.ttft),
        "later_ttft_ms": _times(part.later_ttft),
        "itl_ms": _times(part.itl),
        "tpot_ms": _times(part.tpot),
        "e2e_ms": _times(part.e2e),
        "late_ms": _times(part.late),
        "gains": {name: _gain(gain) for name, gain in part.gains.items()},
        "turns": [
            {
                "turn": number,
                "requests": one.requests,
                "ttft_ms": _times(one.ttft),
                "prompt_tokens": rounded(one.prompt_tokens),
                "cached_tokens": rounded(one.cached_tokens),
                "gain": _gain(one.gain),
            }
            for number, one in enumerate(part.turns, 1)
        ],
        "counters": part.counters,
        "by_round": [
            {
                "round": one.number,
                "planned": one.planned,
                "requests": len(one.asked),
                "failed": one.failures.total(),
                "dropped": one.dropped,
                "seconds": rounded(one.seconds),
                "output_tokens": one.output_tokens,
                "counted": one.grown is not None,
            }
            for one in rounds
        ],
    }


def _times(seconds: dict[str, float | None]) -> dict[str, float | None]:
    return {name: rounded(None if value is None else value * 1e3) for name, value in seconds.items()}


def _gain(gain: Gain | None) -> dict[str, float | None] | None:
    if gain is None:
        return None
    return {"value": rounded(gain.value), "low": rounded(gain.low), "high": rounded(gain.high)}
