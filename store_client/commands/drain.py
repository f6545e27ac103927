# SPDX-License-Identifier: Apache-2.0
"""``moonpool drain``: put nothing more into a segment."""

from __future__ import annotations

import click

from moonpool.store_client.commands.common import connected, open_client

__all__ = ["drain"]


@click.command(short_help="Put nothing more into a segment.")
@click.argument("segment", type=click.IntRange(min=0, max=0xFFFFFFFE))
@click.option("--undo", is_flag=True, help="Use it again.")
@connected
def drain(segment: int, undo: bool, master: str | None, timeout: str | None, config: str | None) -> None:
    """Put nothing more into SEGMENT, a number that `moonpool ls` shows. What it has stays until it is evicted."""
    with open_client(master, timeout, config) as client:
        chunks = client.drain(segment, undo=undo)
    click.echo(f"segment {segment} is {'used again' if undo else 'draining'}: it has {chunks} chunks")
