# SPDX-License-Identifier: Apache-2.0
"""``moonpool pin``: keep chunks in the pool while the command runs."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import click

from moonpool.store_client.commands.common import HashText, NamespaceText, connected, open_client

__all__ = ["pin"]


@click.command(short_help="Keep chunks in the pool while this runs.")
@click.argument("namespace", type=NamespaceText())
@click.argument("hashes", metavar="HASH...", type=HashText(), nargs=-1, required=True)
@connected
def pin(namespace: str, hashes: tuple[bytes, ...], master: str | None, timeout: str | None, config: str | None) -> None:
    """Pin chunks of NAMESPACE by their hashes until Ctrl-C or SIGTERM. A pin ends with the session that holds it."""
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    with open_client(master, timeout, config) as client, client.pin(namespace, list(hashes)) as held:
        if not len(held):
            raise click.ClickException("none of these chunks is there")
        previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            click.echo(f"{len(held)} of {len(hashes)} chunks are pinned until Ctrl-C")
            over.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
