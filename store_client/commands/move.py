# SPDX-License-Identifier: Apache-2.0
"""``moonpool move``: move chunks to another segment."""

from __future__ import annotations

import json

import click

from moonpool.store_client.commands.common import HashText, NamespaceText, connected, open_client
from moonpool.store_client.results import Outcome

__all__ = ["move"]


@click.command(short_help="Move chunks to another segment.")
@click.argument("namespace", type=NamespaceText())
@click.argument("hashes", metavar="HASH...", type=HashText(), nargs=-1, required=True)
@click.option("--segment", type=click.IntRange(min=0, max=0xFFFFFFFE), help="Where to: its number.")
@click.option("--node", metavar="NAME", help="Where to: the name of its node.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@connected
def move(
    namespace: str,
    hashes: tuple[bytes, ...],
    segment: int | None,
    node: str | None,
    as_json: bool,
    master: str | None,
    timeout: str | None,
    config: str | None,
) -> None:
    """Move chunks of NAMESPACE by their hashes to the segment or node that is named. They can be read all the time."""
    with open_client(master, timeout, config) as client:
        results = client.move(namespace, list(hashes), segment=segment, node=node)
    moved, there, missing = (results.count(one) for one in (Outcome.OK, Outcome.ALREADY, Outcome.MISS))
    failed = {hashes[item].hex(): str(error) for item, error in results.errors.items()}
    if as_json:
        click.echo(json.dumps({"moved": moved, "there_before": there, "missing": missing, "failed": failed}, indent=2))
    else:
        click.echo(f"{moved} moved")
        for count, what in ((there, "were there before"), (missing, "do not exist")):
            if count:
                click.echo(f"{count} {what}")
    if failed:
        first = next(iter(failed.values()))
        raise click.ClickException(f"{len(failed)} are where they were: {first}")
