# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench serve``: from the options to what the user sees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.bench.environment import describe_run
from moonpool.bench.errors import ExitStatus
from moonpool.bench.perform import Ending, StatusLine, report_console, say, write_json
from moonpool.bench.plot import plot_serve
from moonpool.bench.serve import report
from moonpool.bench.serve.asking import Place
from moonpool.bench.serve.contest import Contest, ServeOptions, Variant
from moonpool.bench.serve.engines import Engines
from moonpool.bench.serve.summary import summaries
from moonpool.bench.serve.workload import Workload
from moonpool.errors import MoonpoolError
from moonpool.units import format_duration

__all__ = ["Servers", "perform"]


@dataclass(frozen=True)
class Servers:
    """Who is asked.

    Attributes:
        urls: of servers, by name.
        engines: the kv-transfer-config of engines that are started for it, by name; None: without a connector.
        order: all names; the first is compared with the others.
        key: what the servers want to see, or None.
        model: where the model of the engines is, or None.
        engine_args: further arguments of all engines, as vLLM names them.
        start_timeout: seconds until an engine has to be there.
    """

    urls: Mapping[str, str]
    engines: Mapping[str, dict[str, Any] | None]
    order: Sequence[str]
    key: str | None
    model: str | None
    engine_args: dict[str, Any]
    start_timeout: float


def perform(
    workload: Workload, options: ServeOptions, servers: Servers, *, json_file: str | None, plot_file: Path | None
) -> ExitStatus:
    """Ask, and show what was found, also after Ctrl-C or a failure; return the exit status."""
    try:
        environment = describe_run(_parameters(options, servers))
    except MoonpoolError as error:
        say(str(error))
        return ExitStatus.FAILED
    environment["servers"] = None
    ending = Ending()
    variants = [Variant(name) for name in servers.order]
    with StatusLine() as line, ending, contextlib.ExitStack() as stack:
        places = {name: Place(url, None, servers.key) for name, url in servers.urls.items()}
        if servers.engines:
            engines = Engines(str(servers.model), servers.engine_args, servers.start_timeout, line.show)
            places |= stack.enter_context(engines).start(servers.engines)
        contest = Contest({name: places[name] for name in servers.order}, workload, options, line.show)
        variants = list(contest.variants.values())
        try:
            asyncio.run(contest.run())
        finally:
            environment["servers"] = contest.describe()
    asked = any(variant.rounds for variant in variants)
    if json_file != "-" and asked:
        report.print_report(
            report_console(), environment, variants, workload=_workload_text(workload), run=_run_text(options)
        )
    if json_file is not None:
        document = report.document(
            environment, variants, workload=workload.parameters(), seed=options.seed, interrupted=ending.interrupted
        )
        write_json(document, json_file)
    if plot_file is not None and asked:
        plot_serve(summaries(variants), _first_tokens(variants), plot_file)
    ending.say()
    if json_file == "-" or not asked:
        for text in report.trouble(variants):
            say(text, style="yellow")
    return _status(ending, variants)


def _status(ending: Ending, variants: Sequence[Variant]) -> ExitStatus:
    status = ending.status(verified=True)
    failed = any(
        variant.gone or any(one.failures or one.dropped for one in variant.rounds.values()) for variant in variants
    )
    return ExitStatus.FAILED if status is ExitStatus.OK and failed else status


def _parameters(options: ServeOptions, servers: Servers) -> dict[str, Any]:
    return {
        "rounds": options.rounds,
        "rate": options.rate,
        "concurrency": options.concurrency,
        "warmup": options.warmup,
        "timeout": options.timeout,
        "same_prompts": options.same_prompts,
        "prompts": "text" if options.text else "tokens",
        "plain": options.plain,
        "urls": dict(servers.urls),
        # Not all of it: a connector is told secrets there.
        "engines": {name: config and config.get("kv_connector") for name, config in servers.engines.items()},
        "model": servers.model,
        "engine_args": servers.engine_args,
        "fixed": {},
    }


def _workload_text(workload: Workload) -> str:
    values = workload.parameters()
    kind = values.pop("kind")
    facts = values.pop("trace", None)
    said = [_value_text(name, value) for name, value in values.items() if value is not None]
    return " · ".join([kind, *([facts["file"], f"{facts['requests']:,} requests"] if facts else []), *said])


def _value_text(name: str, value: float) -> str:
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')} {format_duration(value)}"
    return f"{name.replace('_', ' ')} {value:,}"


def _run_text(options: ServeOptions) -> str:
    pace = "when they are due"
    if options.rate is not None:
        pace = f"{options.rate:g} begin in a second"
    elif options.concurrency is not None:
        pace = f"{options.concurrency} under way at a time"
    rounds = f"{options.rounds} round{'' if options.rounds == 1 else 's'}"
    same = ", all of the same prompts" if options.same_prompts else ""
    return (
        f"{rounds}{same} · {pace} · {options.warmup} requests of warm-up · at most {format_duration(options.timeout)} "
        f"each · seed {options.seed}"
    )


def _first_tokens(variants: Sequence[Variant]) -> dict[str, list[float]]:
    return {
        variant.name: [
            asked.answer.ttft for one in variant.rounds.values() for asked in one.asked if asked.answer.ttft is not None
        ]
        for variant in variants
    }
