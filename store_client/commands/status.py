# SPDX-License-Identifier: Apache-2.0
"""``moonpool status``: how a pool is."""

from __future__ import annotations

import json
from typing import Any

import click

from moonpool.store_client.commands.common import connected, open_client
from moonpool.store_client.commands.ls import as_dict, console_of, segment_table, troubles
from moonpool.units import format_bytes

__all__ = ["status"]


def facts(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what people want to know of what the master says of itself, as lines of name and value."""
    index, counts, store = (stats.get(name, {}) for name in ("index", "counts", "store"))
    lookups = counts.get("lookups_items", 0)
    loops = stats.get("loops", {})
    wrong = [*stats.get("wrong", ()), *(f"{name}: {loop['error']}" for name, loop in loops.items() if loop["error"])]
    return [
        ("healthy", "yes" if stats.get("healthy") else f"no: {'; '.join(map(str, wrong))}"),
        ("up for", f"{stats.get('uptime_s', 0):,.0f} s, epoch {stats.get('epoch', 0)}"),
        (
            "sessions",
            f"{stats.get('clients', 0):,} clients, {stats.get('nodes', 0):,} nodes, {stats.get('pins', 0):,} pins",
        ),
        (
            "chunks",
            f"{index.get('chunks', 0):,} of {index.get('chunks_max', 0):,}, {index.get('writing', 0):,} being written",
        ),
        ("used", f"{format_bytes(index.get('used_bytes', 0))} of {format_bytes(index.get('capacity_bytes', 0))}"),
        *_disks(stats),
        ("hit rate", f"{100 * (stats.get('hit_rate') or 0.0):.1f}% of {lookups:,} look-ups"),
        (
            "evicted",
            f"{index.get('evicted', 0):,} by {index.get('policy', '?')}, {counts.get('no_space_items', 0):,} refused",
        ),
        ("fences", f"{counts.get('fences_done', 0):,} done, {stats.get('fences_outstanding', 0):,} outstanding"),
        (
            "moves",
            f"{counts.get('moved_items', 0):,} done, {counts.get('not_moved_items', 0):,} not, "
            f"{index.get('moving', 0):,} under way",
        ),
        (
            "spoilt copies",
            f"{counts.get('spoilt_items', 0):,} found, {counts.get('spoilt_replaced_items', 0):,} replaced, "
            f"{counts.get('spoilt_lost_items', 0):,} chunks lost",
        ),
        ("store", f"{store.get('kind', '?')}, {store.get('failures', 0):,} failures"),
    ]


def _disks(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is on disks, where there are any."""
    disks = [one for one in stats.get("segments", ()) if one.get("medium") == "DISK"]
    if not disks:
        return []
    index, counts = stats.get("index", {}), stats.get("counts", {})
    used, capacity = (sum(one[name] for one in disks) for name in ("used_bytes", "capacity_bytes"))
    return [
        (
            "on disks",
            f"{format_bytes(used)} of {format_bytes(capacity)}, {index.get('on_disk', 0):,} chunks only there; "
            f"{counts.get('demoted_items', 0):,} written, {counts.get('loaded_items', 0):,} read, "
            f"{counts.get('spoilt_items', 0):,} spoilt",
        )
    ]


@click.command(short_help="Show how a pool is.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@connected
def status(as_json: bool, master: str | None, timeout: str | None, config: str | None) -> None:
    """Show the segments of a pool and how full they are, hits, sessions, and what the master counts."""
    with open_client(master, timeout, config) as client:
        segments, stats = client.segments(), client.master_stats()
        address = client.stats()["master"]["address"]
    if as_json:
        whole = {"master": address, "segments": [as_dict(one) for one in segments], "stats": stats}
        click.echo(json.dumps(whole, indent=2))
        return
    from rich.table import Table

    console = console_of()
    console.print(f"[bold]master[/bold] {address}")
    console.print(segment_table(segments), "")
    for line in troubles(segments):
        console.print(line, markup=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts(stats):
        table.add_row(name, value)
    console.print(table)
