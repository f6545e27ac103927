# SPDX-License-Identifier: Apache-2.0
"""``moonpool status``: how a pool is."""

from __future__ import annotations

import json
from typing import Any

import click

from moonpool.store_client.commands.common import connected, open_client
from moonpool.store_client.commands.ls import as_dict, segment_table

__all__ = ["status"]


def facts(stats: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return what the master says of itself, as lines of name and value."""
    lines = []
    for name, value in stats.items():
        if isinstance(value, dict):
            lines += facts(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            lines.append((prefix + name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}"))
        elif not isinstance(value, list):
            lines.append((prefix + name, str(value)))
    return lines


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
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]master[/bold] {address}")
    console.print(segment_table(segments))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts(stats):
        table.add_row(name, value)
    console.print(table)
