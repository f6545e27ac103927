# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench serve``: its options."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click

from moonpool.bench.errors import ExitStatus, TraceError, UsageError
from moonpool.bench.options import DURATION, SECRET, Value, json_option, plot_option_of
from moonpool.bench.perform import say
from moonpool.bench.replay.trace import BLOCK_TOKENS, read_trace
from moonpool.bench.serve.workload import MultiTurn, SharedPrefix, TraceWork, Workload

__all__ = ["serve"]

F = TypeVar("F", bound=Callable[..., Any])

_MANY: Final = 1_000_000
_TOKENS_MAX: Final = 10_000_000
_SEED_MAX: Final = (1 << 32) - 1
_CONCURRENCY: Final = 4
_PER_S_MAX: Final = 1e6
#: Of a name that a table has room for.
_NAME: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,32}")

_EXAMPLES: Final = """\b
Examples:
  mooncake-bench serve multi-turn --url pool=http://a:8000 --url none=http://b:8000
  mooncake-bench serve multi-turn --url http://a:8000 --users 64 --turns 8 --rate 2 --think 5s --json result.json
  mooncake-bench serve shared-prefix --url pool=http://a:8000 --url none=http://b:8000 --groups 20 --prefix-tokens 4000
  mooncake-bench serve trace trace.jsonl.gz --url http://a:8000 --speed 2 --requests 2000 --plot ttft.png
  mooncake-bench serve multi-turn --model ./model --engine pool=@kv-transfer.json --engine none
"""

_TOKENS: Final = click.IntRange(1, _TOKENS_MAX)


@click.group(epilog=_EXAMPLES, context_settings={"max_content_width": 120})
def serve() -> None:
    """Ask LLM servers the same, with a pool and without, and compare what users see.

    Each --url, of an OpenAI-compatible server, or --engine, which is started for it, is a row. In every round each of
    them is asked the whole workload, in turn; the first one is compared with the others. `serve WORKLOAD --help` has
    the options.

    Needs aiohttp: pip install 'moonpool[serve]'.
    """


def _named(parse: Callable[[str], Any], name_of: Callable[[str], str]) -> Callable[[str], tuple[str, Any]]:
    """Return a parser of ``NAME=VALUE``, where the name may be left out."""

    def named(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            name, value = name_of(text), text
        return name, parse(value)

    return named


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not an address such as http://host:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address with a password in it would be in every report. Try: --api-key")
    # An impossible port is a ValueError.
    _ = parts.port
    return text.rstrip("/").removesuffix("/v1")


def _json(text: str) -> dict[str, Any]:
    """Read a JSON object, or the file that is named behind an @."""
    try:
        value = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise ValueError(f"{text}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _config(text: str) -> dict[str, Any] | None:
    return None if text == "none" else _json(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= _PER_S_MAX:
        raise ValueError(f"{text!r} is not a number above 0, up to {_PER_S_MAX:g}")
    return value


_SERVERS: Final = (
    click.option(
        "--url",
        "urls",
        type=Value("[name=]url", _named(_url, lambda text: urlsplit(text).netloc)),
        multiple=True,
        help="A server, such as pool=http://a:8000; may be given several times.",
    ),
    click.option(
        "--engine",
        "engines",
        type=Value("[name=]none|json|@file", _named(_config, lambda text: "none" if text == "none" else "engine")),
        multiple=True,
        help="A vLLM engine that is started for it, with this kv-transfer-config; may be given several times.",
    ),
    click.option("--model", help="What servers call it [default: the first that they have]; of --engine, where it is."),
    click.option(
        "--engine-args",
        type=Value("json|@file", _json),
        help='Of all --engine, as vLLM names them: {"max_model_len": 4096}.',
    ),
    click.option(
        "--start-timeout", type=DURATION, default="10min", show_default=True, help="Until an --engine has to be there."
    ),
    click.option("--api-key", type=SECRET, envvar="OPENAI_API_KEY", metavar="TEXT|@FILE", help="For all --url."),
    click.option(
        "--prompts",
        type=click.Choice(["tokens", "text"]),
        default="tokens",
        show_default=True,
        help="tokens: token ids, as many as are said; text: a word for each.",
    ),
    click.option(
        "--vocab",
        type=click.IntRange(1),
        help="Token ids are below this.  [default: 30000, or what an --engine's model has]",
    ),
    click.option("--plain", is_flag=True, help="Send only what OpenAI's own interface has; answers may be shorter."),
    click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Of each server."),
    click.option(
        "--warmup", type=click.IntRange(0, _MANY), default=2, show_default=True, help="Requests ahead, of each server."
    ),
    click.option("--timeout", type=DURATION, default="60s", show_default=True, help="Of one request, with its answer."),
    click.option(
        "--seed",
        type=click.IntRange(0, _SEED_MAX),
        help="Of all that is asked.  [default: a new one, which is shown: caches may have the old one]",
    ),
    click.option("--same-prompts", is_flag=True, help="Ask the same in every round, so that caches are warm."),
    json_option,
    plot_option_of("how long requests waited for their first token"),
)

_PACE: Final = (
    click.option(
        "--rate",
        type=Value("number", _positive),
        help="Conversations, or requests that have none, that begin in a second on average (Poisson).",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, 4096),
        help=f"Requests under way at a time, each sent when there is room.  [default: {_CONCURRENCY}]",
    ),
)

_OUTPUT: Final = click.option(
    "--output-tokens", type=_TOKENS, default=64, show_default=True, help="Tokens of an answer."
)


def _with(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@serve.command("multi-turn")
@click.option("--users", type=click.IntRange(1, _MANY), default=16, show_default=True, help="Conversations of a round.")
@click.option("--turns", type=click.IntRange(1, 10_000), default=5, show_default=True, help="Requests of each.")
@click.option("--turn-tokens", type=_TOKENS, default=256, show_default=True, help="Tokens that a user adds in a turn.")
@_OUTPUT
@click.option(
    "--think",
    type=DURATION,
    default="0s",
    show_default=True,
    help="Between an answer and the next turn, on average (exponential).",
)
@_with(*_PACE, *_SERVERS)
@click.pass_context
def multi_turn(ctx: click.Context, /, **given: Any) -> None:
    """Users who go on talking: each prompt is everything that was said before, and something new.

    The answers of the server are part of the prompts that follow. Where a request fails its conversation ends.
    """
    if given["users"] * given["turns"] > _MANY:
        raise click.UsageError(f"--users times --turns is more than {_MANY:,} requests of a round")
    workload = MultiTurn(given["users"], given["turns"], given["turn_tokens"], given["output_tokens"], given["think"])
    ctx.exit(_perform(workload, given))


@serve.command("shared-prefix")
@click.option("--groups", type=click.IntRange(1, _MANY), default=8, show_default=True, help="Different prefixes.")
@click.option(
    "--requests", type=click.IntRange(1, _MANY), default=64, show_default=True, help="Of a round, of all groups."
)
@click.option("--prefix-tokens", type=_TOKENS, default=1024, show_default=True, help="Tokens that a group shares.")
@click.option("--suffix-tokens", type=_TOKENS, default=64, show_default=True, help="Tokens of a request's own.")
@_OUTPUT
@_with(*_PACE, *_SERVERS)
@click.pass_context
def shared_prefix(ctx: click.Context, /, **given: Any) -> None:
    """Requests of which many begin alike, as with system prompts or documents."""
    names = ("groups", "requests", "prefix_tokens", "suffix_tokens", "output_tokens")
    ctx.exit(_perform(SharedPrefix(*(given[name] for name in names)), given))


@serve.command("trace")
@click.argument("trace_file", metavar="TRACE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--speed", type=Value("number", _positive), default=1.0, show_default=True, help="Times as fast.")
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Only the first N of the trace.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 1 << 16),
    default=BLOCK_TOKENS,
    show_default=True,
    help="Tokens of a block. With less than a trace has, all prompts are as much shorter.",
)
@click.option("--output-tokens-max", type=_TOKENS, help="Answers are cut to this.  [default: as long as in the trace]")
@_with(*_SERVERS)
@click.pass_context
def trace(ctx: click.Context, /, **given: Any) -> None:
    """The requests of a trace, at their times.

    TRACE is as `mooncake-bench replay --help` describes it. Equal hash_ids become equal tokens.
    """
    given.update(rate=None, concurrency=None)
    file = given["trace_file"]
    try:
        requests = read_trace(file).first(given["requests"])
        facts = {"file": file.name, "requests": len(requests.requests), "distinct": len(requests.names)}
        workload = TraceWork(requests, facts, given["speed"], given["block_tokens"], given["output_tokens_max"])
    except TraceError as error:
        say(str(error))
        ctx.exit(ExitStatus.FAILED)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    ctx.exit(_perform(workload, given))


def _perform(workload: Workload, given: dict[str, Any]) -> ExitStatus:
    _check(given)
    try:
        # Late, as for every command that needs what not everybody has.
        import aiohttp  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.UsageError("aiohttp is not installed. Try: pip install 'moonpool[serve]'") from error
    from moonpool.bench.serve.contest import ServeOptions
    from moonpool.bench.serve.perform import Servers, perform

    timed = workload.kind == "trace" or given["rate"] is not None
    options = ServeOptions(
        rounds=given["rounds"],
        rate=given["rate"],
        concurrency=None if timed else given["concurrency"] or _CONCURRENCY,
        warmup=given["warmup"],
        timeout=given["timeout"],
        seed=secrets.randbelow(_SEED_MAX) if given["seed"] is None else given["seed"],
        same_prompts=given["same_prompts"],
        text=given["prompts"] == "text",
        vocabulary=given["vocab"],
        plain=given["plain"],
        model=None if given["engines"] else given["model"],
    )
    servers = Servers(
        urls=dict(given["urls"]),
        engines=dict(given["engines"]),
        order=_names(given),
        key=None if given["api_key"] is None else given["api_key"].decode(errors="replace"),
        model=given["model"],
        engine_args=given["engine_args"] or {},
        start_timeout=given["start_timeout"],
    )
    return perform(workload, options, servers, json_file=given["json_file"], plot_file=given["plot_file"])


def _names(given: dict[str, Any]) -> Sequence[str]:
    return [name for name, _ in (*given["urls"], *given["engines"])]


def _check(given: dict[str, Any]) -> None:
    names = _names(given)
    if not names:
        raise click.UsageError("whom to ask? Try: --url http://host:8000")
    if twice := [name for name in names if names.count(name) > 1]:
        raise click.UsageError(
            f"two are called {twice[0]}. Try: --url one={given['urls'][0][1] if given['urls'] else '...'}"
        )
    if given["rate"] is not None and given["concurrency"] is not None:
        raise click.UsageError("--rate says when requests come, --concurrency how many are under way: one of the two")
    if given["engines"]:
        if given["model"] is None:
            raise click.UsageError("--engine needs --model: where the model is")
        if given["prompts"] == "text":
            raise click.UsageError("--engine takes token ids: --prompts text goes with --url")
        if given["plain"]:
            raise click.UsageError("--plain belongs to --url")
    elif given["engine_args"] is not None:
        raise click.UsageError("--engine-args belongs to --engine")
