# SPDX-License-Identifier: Apache-2.0
"""The pool that a benchmark goes through: one that runs, or one that is started for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moonpool.bench.errors import UsageError
from moonpool.cluster import local_cluster

if TYPE_CHECKING:
    from moonpool.address import Address

__all__ = ["PoolOptions", "opened", "pool_options"]

#: Options that say what pool to start.
_OF_OWN: Final = ("nodes", "dram", "store")


@dataclass(frozen=True)
class PoolOptions:
    """Which pool it is.

    Attributes:
        master: of a pool that runs; None: one is started.
        secret: of that pool.
        nodes: of the pool that is started.
        dram: bytes that each of them lends.
        metadata: ``memory`` or ``sqlite``, of its master.
    """

    master: Address | None = None
    secret: bytes | None = None
    nodes: int = 1
    dram: int = 0
    metadata: str = "memory"


def pool_options(given: dict[str, Any], dram: int) -> PoolOptions:
    """Return which pool the command line means.

    Args:
        given: ``--master``, ``--secret``, ``--nodes``, ``--dram`` and ``--store``, each None where it is not given.
        dram: where it is not given.

    Raises:
        UsageError: they do not fit together.
    """
    master, secret = given["master"], given["secret"]
    if master is not None and (useless := [name for name in _OF_OWN if given[name] is not None]):
        raise UsageError(f"--{useless[0]} is about a pool that is started: it does not go with --master")
    if master is None and secret is not None:
        raise UsageError("--secret belongs to --master")
    return PoolOptions(master, secret, given["nodes"] or 1, given["dram"] or dram, given["store"] or "memory")


@contextlib.contextmanager
def opened(options: PoolOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start the pool, unless it runs; yield the address of its master, and what else a client of it is to be told."""
    if options.master is not None:
        yield str(options.master), {"secret": options.secret}
        return
    with local_cluster(options.nodes, str(options.dram), options.metadata) as cluster:
        yield cluster.master, cluster.client_options
