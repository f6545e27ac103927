# SPDX-License-Identifier: Apache-2.0
"""``moonpool node``: lend memory of this host to a pool."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import click

from moonpool.cli import check_descriptor
from moonpool.node.node import StoreNode
from moonpool.node.settings import NodeSettings
from moonpool.units import format_bytes

__all__ = ["node"]


@click.command(short_help="Lend memory of this host to a pool.")
@click.option("--master", metavar="HOST:PORT", help="Address of the master.")
@click.option("--dram", metavar="SIZE", help="Memory to lend, such as 8GiB.")
@click.option("--ssd", metavar="PATH:SIZE", help="File or folder on a disk below the memory, and how much it takes.")
@click.option("--listen", metavar="HOST:PORT", help="Address to accept clients on.")
@click.option("--advertise", metavar="HOST:PORT", help="Address by which clients reach this node, if it is another.")
@click.option("--name", help="What master and clients call this node.")
@click.option("--host-id", help="What tells hosts apart: replicas go to different ones.")
@click.option("--huge-pages", type=click.Choice(["auto", "required", "never"]), help="Pages of 2 MiB.")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond loopback without a secret.")
@click.option("--tls-cert", metavar="FILE", help="Certificate, PEM. With --tls-key and --tls-ca: mutual TLS.")
@click.option("--tls-key", metavar="FILE", help="Its key, PEM.")
@click.option("--tls-ca", metavar="FILE", help="Authority that the others' certificates come from, PEM.")
@click.option("--tls-name", metavar="NAME", help="Name in the master's certificate, if it is not the host.")
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file with a table [node].")
@click.option("--ready-fd", type=int, help="Write a line to this descriptor when the memory is lent.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
def node(config: str | None, ready_fd: int | None, verbose: bool, **options: Any) -> None:
    """Lend memory of this host to a pool, until SIGTERM or Ctrl-C.

    The secret comes from MOONPOOL_NODE_SECRET or the file, so that no list of processes shows it. docs/settings.md has
    all settings.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if ready_fd is not None:
        check_descriptor(ready_fd)
    given = {name: value for name, value in options.items() if value is not None}
    settings = NodeSettings.load(given, file=config)
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with StoreNode(settings=settings) as lent:
            line = f"moonpool node: segment {lent.segment} of {format_bytes(settings.dram)} is lent at {lent.address}"
            if settings.ssd is not None:
                line += f", with {settings.ssd} below it" + (f" ({lent.disk_note})" if lent.disk_note else "")
            click.echo(line)
            if ready_fd is not None:
                os.write(ready_fd, f"{line}\n".encode())
                os.close(ready_fd)
            over.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
