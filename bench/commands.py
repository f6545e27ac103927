# SPDX-License-Identifier: Apache-2.0
"""The commands of ``mooncake-bench`` and their options."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import moonpool
from moonpool.bench import doctor as doctors
from moonpool.bench.backends import ENGINES, SAME_HOST
from moonpool.bench.compare_command import compare
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.hardware.command import hardware
from moonpool.bench.listening import serve_one_run
from moonpool.bench.options import (
    ADDRESS,
    BATCH_MAX,
    DEPTH_MAX,
    DURATION,
    SECRET,
    SIZE,
    THREADS_MAX,
    Choices,
    ListOf,
    Value,
    auto,
    count,
    json_option,
    memory_name,
    plot_option,
)
from moonpool.bench.perform import perform
from moonpool.bench.report import doctor_table
from moonpool.bench.runner import Options
from moonpool.bench.sweep import DEFAULT_MEMORY, Sweep, goes_with, quick
from moonpool.bench.work import OPS, ORDERS, Tuning
from moonpool.errors import ConfigError
from moonpool.transfer_engine import EngineSettings, probe

__all__ = ["cli"]

#: Commands that are imported when they are asked for, and where they are.
_LATE = {
    "master": "moonpool.bench.pool.master_command",
    "replay": "moonpool.bench.replay.command",
    "serve": "moonpool.bench.serve.command",
    "ssd": "moonpool.bench.pool.ssd_command",
    "store": "moonpool.bench.pool.store_command",
}
_LANES_MAX = 64
_QUEUE_PAIRS_MAX = 16
_INLINE_BYTES_MAX = 4096
_SPIN_US_MAX = 10_000
#: Options that mean nothing to other transports.
_OF_RDMA = ("devices", "target_devices", "queue_pairs", "inline_bytes")

_QUICK_EXAMPLES = """\b
Examples:
  mooncake-bench                     what does this machine do?
  mooncake-bench --json -            the same for programs
  mooncake-bench doctor              what does it lack to do better?
  mooncake-bench compare --quick     what do other engines do here?
  mooncake-bench transfer --help     everything that can be varied
"""

_TRANSFER_EXAMPLES = """\b
Examples:
  mooncake-bench transfer --block-size 4KiB,64KiB,1MiB --batch 1,128 --order sequential,random
  mooncake-bench transfer --transport tcp --op write --threads 1,2 --lanes 1,2,4 --json result.json
  mooncake-bench transfer --transport tcp --block-size 1MiB --batch 1 --limit stream
  mooncake-bench transfer --transport tcp --only limit --json -
  mooncake-bench transfer --transport rdma --devices mlx5_0 --target-devices mlx5_1 --block-size 64KiB,1MiB
  mooncake-bench transfer --transport rdma --queue-pairs 1,2,4 --slice 256KiB,1MiB --spin-us 0,50

\b
Across two hosts:
  there$ mooncake-bench transfer --listen 0.0.0.0:7800 --secret @/etc/moonpool/secret
  here$  mooncake-bench transfer --target there:7800 --secret @/etc/moonpool/secret --block-size 1MiB
"""

_DOCTOR_EXAMPLES = """\b
Examples:
  mooncake-bench doctor
  mooncake-bench doctor --json - | jq '.checks[] | select(.status != "OK")'
"""


def _transports() -> list[str]:
    """Those that this host has and this program can measure."""
    available = {transport.name for transport in probe() if transport.available}
    return [name for name in ENGINES if name in available]


class _Group(click.Group):
    """Imports what is about the pool when it is asked for: gRPC alone takes longer to load than everything else."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LATE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LATE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(_LATE[cmd_name]), cmd_name)
        return command


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=_QUICK_EXAMPLES,
)
@click.version_option(moonpool.__version__, prog_name="mooncake-bench")
@json_option
@plot_option
@click.pass_context
def cli(ctx: click.Context, json_file: str | None, plot_file: Path | None) -> None:
    """Measure verified transfers between two processes, each beside the limit of this machine.

    Without a command: a quick sweep in under 45 seconds over the transports this host has, read and write, 4 KiB to
    16 MiB, one block at a time and 128 at once.

    Every row runs in rounds: a window of the engine and a window of its limit over the same blocks (raw sockets in C
    for tcp, perftest for rdma, memcpy for transports within a process). Every byte is checked on both sides after
    every window.

    The exit status is 0 when all bytes were right on both sides, 1 when they were not, 2 for a command line that
    makes no sense, 3 when something failed, and 130 after Ctrl-C, which still shows what was measured.
    """
    if ctx.invoked_subcommand is None:
        options = Options(rounds=3, duration=0.12, warmup=0.03, budget=38.0)
        ctx.exit(perform(quick(_transports()), options, json_file=json_file, plot_file=plot_file))
    if json_file is not None or plot_file is not None:
        raise click.UsageError("--json and --plot belong behind the command")


@cli.command(epilog=_TRANSFER_EXAMPLES)
@click.option(
    "--transport", type=Choices("name", list(ENGINES)), help="tcp, rdma, shm, local.  [default: all this host has]"
)
@click.option(
    "--op",
    type=Choices("name", OPS),
    default="read,write",
    show_default=True,
    help="read: from the target to here; write: from here to the target.",
)
@click.option(
    "--block-size",
    type=ListOf("size", SIZE),
    default="1MiB",
    show_default=True,
    help="Bytes of one descriptor: 4KiB, 1MiB.",
)
@click.option(
    "--batch",
    type=ListOf("n", count(BATCH_MAX)),
    default="16",
    show_default=True,
    help="Descriptors of one transfer.",
)
@click.option(
    "--depth",
    type=ListOf("n", count(DEPTH_MAX)),
    default="1",
    show_default=True,
    help="Transfers that each thread has under way at a time.",
)
@click.option(
    "--order",
    type=Choices("name", ORDERS),
    default="sequential",
    show_default=True,
    help="random: neighbours in a batch are no neighbours in memory, on both sides.",
)
@click.option(
    "--lanes",
    type=ListOf("n", count(_LANES_MAX, auto=True)),
    default="auto",
    show_default=True,
    help="TCP connections, of the engine and of the limit.",
)
@click.option(
    "--devices",
    metavar="NAME[,NAME...]",
    help="rdma: devices of this side, as NAME, NAME:PORT or NAME:PORT@GID_INDEX.  [default: every active port]",
)
@click.option(
    "--target-devices",
    metavar="NAME[,NAME...]",
    help="rdma: devices of the target. On one host, the other ends of the cables.  [default: every active port]",
)
@click.option(
    "--queue-pairs",
    type=ListOf("n", count(_QUEUE_PAIRS_MAX, auto=True)),
    default="auto",
    show_default=True,
    help="rdma: queue pairs for each rail.",
)
@click.option(
    "--slice",
    "slice_bytes",
    type=ListOf("size", auto(SIZE)),
    default="auto",
    show_default=True,
    help="What a lane takes of a large transfer at once: 256KiB, 4MiB.",
)
@click.option(
    "--inline",
    "inline_bytes",
    type=ListOf("bytes", count(_INLINE_BYTES_MAX, least=0, auto=True)),
    default="auto",
    show_default=True,
    help="rdma: writes up to this size travel inside their work request; 0 switches that off.",
)
@click.option(
    "--spin-us",
    type=ListOf("n", count(_SPIN_US_MAX, least=0, auto=True)),
    default="auto",
    show_default=True,
    help="Microseconds of polling for the end of a transfer before sleeping; 0 sleeps at once.",
)
@click.option(
    "--threads",
    type=ListOf("n", count(THREADS_MAX)),
    default="1",
    show_default=True,
    help="User threads that transfer at the same time.",
)
@click.option(
    "--memory",
    type=ListOf("name", memory_name),
    help="Memory that the caller has (registered), or that the engine made (allocated), or of a GPU (cuda:0; of one "
    "side: cuda:0/registered, and registered/cuda:0 for the target's).  "
    "[default: registered; shm: allocated]",
)
@click.option(
    "--footprint",
    type=Value("size", SIZE),
    help="Memory of each side that the blocks cycle through.  [default: 256MiB, or one batch per thread]",
)
@click.option("--duration", type=DURATION, default="1s", show_default=True, help="Length of one window.")
@click.option("--warmup", type=DURATION, default="200ms", show_default=True, help="Ahead of every window.")
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Windows of each kind; the figures are medians over them.",
)
@click.option(
    "--limit",
    "mode",
    type=click.Choice(["acked", "stream"]),
    default="acked",
    show_default=True,
    help="Raw sockets with one answer per batch, as transfers have it, or with none until the end.",
)
@click.option(
    "--limit-threads",
    "copy_threads",
    type=click.IntRange(1, 256),
    help="Threads of a limit that copies (shm, local).  [default: one for each core]",
)
@click.option("--only", type=click.Choice(["engine", "limit"]), help="Measure one of the two alone.")
@json_option
@plot_option
@click.option(
    "--listen",
    type=ADDRESS,
    help="Be the target of one run from another host; the other side says what is done. "
    "The next two ports are used as well, for the data.",
)
@click.option("--target", type=ADDRESS, help="Run against a benchmark that listens on another host.")
@click.option(
    "--secret",
    type=SECRET,
    envvar="MOONCAKE_BENCH_SECRET",
    metavar="TEXT|@FILE",
    help="What both hosts must know; also read from MOONCAKE_BENCH_SECRET. The data is not encrypted.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without a secret.")
@click.pass_context
def transfer(ctx: click.Context, /, **given: Any) -> None:
    """Measure every combination of the options given: lists are swept.

    Sizes are powers of two (4KiB, 1MiB), rates are decimal (GB/s = 10^9 bytes per second). An op is one block; p50,
    p99 and p99.9 are times of one whole transfer, from submitting a batch to having its bytes in place.
    """
    if given["listen"] is not None:
        ctx.exit(_listen(ctx, given))
    works, options = _plan(given)
    ctx.exit(perform(works, options, json_file=given["json_file"], plot_file=given["plot_file"]))


def _plan(given: dict[str, Any]) -> tuple[list[Any], Options]:
    target = given["target"]
    transports = given["transport"] or [name for name in _transports() if target is None or name not in SAME_HOST]
    if not given["transport"]:
        transports = [name for name in transports if all(goes_with(name, one) for one in given["memory"] or ())]
    if given["insecure"]:
        raise click.UsageError("--insecure belongs to --listen")
    if "rdma" not in transports and (useless := [name for name in _OF_RDMA if given[name] not in (None, [None])]):
        option = useless[0].removesuffix("_bytes").replace("_", "-")
        raise click.UsageError(f"--{option} belongs to --transport rdma, which is not measured here")
    if "tcp" in transports and given["mode"] == "acked" and max(given["depth"]) > 1:
        raise click.UsageError(
            "--depth: raw sockets with an answer to each batch have one under way; add --limit stream"
        )
    if target is not None and (inside := sorted(SAME_HOST.intersection(transports))):
        raise click.UsageError(f"--transport {inside[0]} stays on one host: it has no --target")
    works = []
    try:
        for transport in transports:
            sweep = Sweep(
                [transport],
                given["op"],
                given["block_size"],
                given["batch"],
                given["order"],
                [None] if transport == "rdma" else given["lanes"],
                given["threads"],
                given["footprint"],
                given["memory"] or [DEFAULT_MEMORY[transport]],
                _tunings(given, rdma=transport == "rdma"),
                given["depth"],
            )
            works.extend(sweep.works())
    except (ConfigError, UsageError) as error:
        raise click.UsageError(str(error)) from error
    return works, Options(
        given["rounds"],
        given["duration"],
        given["warmup"],
        given["mode"],
        given["only"],
        target,
        given["secret"],
        given["copy_threads"],
    )


def _tunings(given: dict[str, Any], *, rdma: bool) -> list[Tuning]:
    axes = [given["queue_pairs"], given["slice_bytes"], given["inline_bytes"], given["spin_us"]]
    if not rdma:
        axes[0] = axes[2] = [None]
    ends = (given["devices"], given["target_devices"]) if rdma else (None, None)
    tunings = [Tuning(*ends, *values) for values in itertools.product(*axes)]
    for tuning in tunings:
        EngineSettings.load(tuning.settings(target=False), environ={})
    return tunings


def _listen(ctx: click.Context, given: dict[str, Any]) -> ExitStatus:
    for parameter in ctx.command.params:
        name = parameter.name or ""
        written = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if written and name not in ("listen", "secret", "insecure"):
            raise click.UsageError(f"{parameter.opts[0]} belongs to the side with --target, which says what is done")
    try:
        return serve_one_run(given["listen"], given["secret"], insecure=given["insecure"])
    except UsageError as error:
        raise click.UsageError(str(error)) from error


@cli.command(epilog=_DOCTOR_EXAMPLES)
@json_option
@click.pass_context
def doctor(ctx: click.Context, json_file: str | None) -> None:
    """Say what this host offers to transfers, what holds it back, and how to repair that.

    Each line is OK, degraded (it works, but slower or for fewer than it could) or missing. The exit status is 0
    unless something is missing without which nothing can be transferred.
    """
    findings = doctors.examine()
    if json_file is not None:
        text = json.dumps(doctors.document(findings), indent=2) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")
    if json_file != "-":
        Console().print(doctor_table(findings))
    ctx.exit(ExitStatus.OK if doctors.healthy(findings) else ExitStatus.NOT_VERIFIED)


cli.add_command(compare)
cli.add_command(hardware)
