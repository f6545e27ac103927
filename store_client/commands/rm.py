# SPDX-License-Identifier: Apache-2.0
"""``moonpool rm``: remove chunks."""

from __future__ import annotations

import click

from moonpool.store_client.commands.common import HashText, NamespaceText, connected, open_client
from moonpool.store_client.results import Outcome

__all__ = ["rm"]


@click.command(short_help="Remove chunks.")
@click.argument("namespace", type=NamespaceText())
@click.argument("hashes", metavar="HASH...", type=HashText(), nargs=-1, required=True)
@click.option("--prefix", is_flag=True, help="And all chunks that descend from them.")
@connected
def rm(
    namespace: str, hashes: tuple[bytes, ...], prefix: bool, master: str | None, timeout: str | None, config: str | None
) -> None:
    """Remove chunks of NAMESPACE by their hashes, of 64 hexadecimal digits each."""
    with open_client(master, timeout, config) as client:
        if prefix:
            removed = [client.remove_prefix(namespace, one) for one in hashes]
            click.echo(f"{sum(one.removed for one in removed)} removed")
            in_use = sum(one.in_use for one in removed)
            missing = 0
        else:
            results = client.remove(namespace, list(hashes))
            click.echo(f"{results.count(Outcome.OK)} removed")
            in_use, missing = results.count(Outcome.FAILED), results.count(Outcome.MISS)
    if missing:
        click.echo(f"{missing} were not there")
    if in_use:
        raise click.ClickException(f"{in_use} are pinned and stay")
