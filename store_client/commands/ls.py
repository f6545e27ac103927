# SPDX-License-Identifier: Apache-2.0
"""``moonpool ls``: the segments of a pool."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click

from moonpool.proto import pool_pb2 as pb
from moonpool.store_client.commands.common import connected, open_client

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["as_dict", "console_of", "ls", "segment_table", "troubles"]

_BAR: Final = 10
# Columns where standard output is no terminal: what reads it wants whole words.
_COLUMNS: Final = 1000


def console_of() -> Console:
    """Return the console of a command, which is on standard output."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)


def as_dict(segment: pb.Segment) -> dict[str, Any]:
    """Return a segment for JSON."""
    return {
        "segment": segment.segment,
        "state": pb.SegmentState.Name(segment.state).lower(),
        "node": segment.node,
        "medium": pb.Medium.Name(segment.medium).lower(),
        "host_id": segment.host_id,
        "address": segment.address,
        "incarnation": segment.incarnation.hex(),
        "capacity_bytes": segment.capacity_bytes,
        "used_bytes": segment.used_bytes,
        "largest_free_bytes": segment.largest_free_bytes,
        "chunks": segment.found_chunks,
        "draining": draining(segment),
        "trouble": segment.trouble,
    }


def draining(segment: pb.Segment) -> dict[str, Any] | None:
    """Return how far a drain has got, for JSON; None: there is none."""
    if not segment.HasField("draining"):
        return None
    its = segment.draining
    return {"moved": its.moved, "moving": its.moving, "stuck": its.stuck, "cause": its.cause}


def troubles(segments: list[pb.Segment]) -> list[str]:
    """Return what is the matter with segments and their names, and why a drain of them is stuck, as lines."""
    memory = [one for one in segments if one.medium == pb.DRAM and one.state != pb.LOST]
    engines = Counter(node for node, _ in {(one.node, one.incarnation) for one in memory})
    return [
        f"{count} nodes are called {node}: who drains or looks for one of them may get the other. Give each a --name"
        for node, count in sorted(engines.items())
        if count > 1
    ] + [
        f"segment {one.segment} of {one.node}: {why}"
        for one in segments
        for why in (one.trouble, f"{one.draining.stuck:,} stuck: {one.draining.cause}" if one.draining.stuck else "")
        if why
    ]


def fill_bar(used: int, capacity: int) -> str:
    """Return a bar of text, and the share in percent."""
    share = used / capacity if capacity else 0.0
    full = round(share * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {100 * share:3.0f}%"


def segment_table(segments: list[pb.Segment]) -> Any:
    """Return the segments as a table of rich."""
    from rich.table import Table

    from moonpool.units import format_bytes

    table = Table(box=None, pad_edge=False)
    for heading in ("segment", "node", "host", "address", "state"):
        # Rather over two lines than without its end.
        table.add_column(heading, overflow="fold")
    table.add_column("chunks", justify="right", no_wrap=True)
    table.add_column("used", no_wrap=True)
    for one in sorted(segments, key=lambda one: one.segment):
        state = pb.SegmentState.Name(one.state).lower()
        if one.medium == pb.DISK:
            state = f"disk, {state}"
        if one.draining.stuck:
            state += f", {one.draining.stuck:,} stuck"
        table.add_row(
            str(one.segment),
            one.node,
            one.host_id,
            one.address,
            state if one.state == pb.ACTIVE else f"[yellow]{state}[/yellow]",
            f"{one.found_chunks:,}",
            f"{fill_bar(one.used_bytes, one.capacity_bytes)} of {format_bytes(one.capacity_bytes)}",
        )
    return table


@click.command(short_help="List the segments of a pool.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@connected
def ls(as_json: bool, master: str | None, timeout: str | None, config: str | None) -> None:
    """List the segments of a pool: which node lends how much, and how full it is."""
    with open_client(master, timeout, config) as client:
        segments = client.segments()
    if as_json:
        click.echo(json.dumps([as_dict(one) for one in segments], indent=2))
        return
    console = console_of()
    console.print(segment_table(segments))
    for line in troubles(segments):
        console.print(line, markup=False)
