# SPDX-License-Identifier: Apache-2.0
"""``moonpool master``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from moonpool.cli import check_descriptor
from moonpool.errors import ConfigError
from moonpool.master.server import MasterServer
from moonpool.master.settings import MasterSettings

__all__ = ["master"]

_EXAMPLES = """\b
Examples:
  moonpool master                                           for this host: 127.0.0.1:7600, moonpool.db in this folder
  moonpool master --store sqlite:/var/lib/moonpool/master.db --listen 0.0.0.0:7600 --secret @/etc/moonpool/secret
  moonpool master --store memory --listen 127.0.0.1:0       forgets everything when it ends
  curl -s 127.0.0.1:7601/status

\b
Every other setting (watermarks, leases, limits) comes from the environment or a file:
  MOONPOOL_MASTER_LEASE_MAX=30s moonpool master
  moonpool master --config /etc/moonpool.toml               its table [master]
"""


@click.command(epilog=_EXAMPLES)
@click.option("--listen", metavar="HOST:PORT", help="For nodes and clients.  [default: 127.0.0.1:7600]")
@click.option(
    "--http", metavar="HOST:PORT|none", help="For /livez, /healthz, /metrics, /status.  [default: 127.0.0.1:7601]"
)
@click.option(
    "--store",
    metavar="sqlite:PATH|etcd:HOST:PORT|memory",
    help="Where metadata is kept.  [default: sqlite:moonpool.db]",
)
@click.option("--secret", metavar="TEXT|@FILE", help="Cluster secret; needed beyond loopback.")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond loopback without secret and TLS.")
@click.option("--tls-cert", metavar="FILE", help="Certificate, PEM. With --tls-key and --tls-ca: mutual TLS.")
@click.option("--tls-key", metavar="FILE", help="Its key, PEM.")
@click.option("--tls-ca", metavar="FILE", help="Authority that the others' certificates come from, PEM.")
@click.option("--cluster", metavar="NAME", help="The name of the cluster.  [default: moonpool]")
@click.option("--policy", metavar="NAME", help="What goes first when there is no room: prefix, s3fifo, lru.")
@click.option("--chunks-max", type=int, metavar="N", help="Most chunks.  [default: 16777216]")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML file with a table [master].")
@click.option(
    "--ready-fd", type=int, metavar="N", help="Write the address to this descriptor when it serves, and close it."
)
@click.option("-v", "--verbose", is_flag=True, help="Say what happens.")
def master(*, config: Path | None, ready_fd: int | None, verbose: bool, secret: str | None, **options: Any) -> None:
    """Run the master of a pool.

    It prints one line with its address when it serves. SIGTERM and Ctrl-C stop it: calls that are under way are
    finished, and what is committed is in the store. After a restart chunks are found again as soon as their nodes are
    back.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    given = {name: value for name, value in options.items() if value is not None}
    if secret is not None:
        given["secret"] = secret
    if ready_fd is not None:
        check_descriptor(ready_fd)
    uvloop.run(_serve(MasterSettings.load(given, file=config), ready_fd))


async def _serve(settings: MasterSettings, ready_fd: int | None) -> None:
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    server = MasterServer(settings)
    starting = asyncio.ensure_future(server.start())
    waiting = asyncio.ensure_future(end.wait())
    try:
        # Taking a large store takes seconds, and must not make it deaf.
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            _tell(server, ready_fd)
            await waiting
    finally:
        waiting.cancel()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(starting, return_exceptions=True)
        await server.stop()


def _tell(server: MasterServer, ready_fd: int | None) -> None:
    pages = f", status on http://{server.http_address}/status" if server.http_address else ""
    doing = server.role.doing()
    click.echo(f"moonpool master: {doing} on {server.address}{pages}")
    if ready_fd is not None:
        try:
            with os.fdopen(ready_fd, "w", encoding="ascii") as ready:
                ready.write(f"{server.address}\n")
        except OSError as error:
            raise ConfigError(f"--ready-fd {ready_fd} cannot be written", cause=error.strerror or "") from error
