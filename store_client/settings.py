# SPDX-License-Identifier: Apache-2.0
"""What can be set about a store client."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from moonpool.address import parse_addresses
from moonpool.proto.tls import Tls
from moonpool.settings import load, setting

__all__ = ["StoreClientSettings"]

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class StoreClientSettings:
    """Every setting of a client. Sizes are bytes, durations are seconds.

    Each value is the argument given, else the environment variable ``MOONPOOL_STORE_CLIENT_<FIELD>``, else the key in
    the table ``[store_client]`` of the TOML file that ``MOONPOOL_CONFIG`` names, else the default.
    """

    master: str = setting("127.0.0.1:7600", "Address of the master, or of several with commas between them.")
    name: str = setting("client", "What the master and the nodes call this client, for people.")
    secret: bytes | None = setting(
        None, "Cluster secret, the same for master, nodes and clients. It never crosses the wire.", secret=True
    )
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate of this client, and those between it and the authority. With `tls_key` and "
        "`tls_ca` calls go over TLS, and both sides show a certificate.",
    )
    tls_key: str | None = setting(None, "PEM file with the key of `tls_cert`, without a passphrase.")
    tls_ca: str | None = setting(None, "PEM file with the authority that the master's certificate has to come from.")
    tls_name: str | None = setting(
        None, "Name that the certificate of the master is for. None: the host of its address, as a name or as an IP."
    )
    host_id: str | None = setting(None, "What tells hosts apart: replicas go to different ones. None: the host name.")
    timeout: float = setting(
        10.0, "Longest time of a call that names no other.", unit="seconds", minimum=0.01, maximum=_HOUR
    )
    startup_timeout: float = setting(
        5.0, "Longest time to reach the master when the client is made.", unit="seconds", minimum=0.01, maximum=_HOUR
    )
    lease: float = setting(
        5.0,
        "How long the chunks of a get stay where they are. The master may grant less. A get that takes longer is a "
        "miss.",
        unit="seconds",
        minimum=0.001,
        maximum=_HOUR,
    )
    space_wait: float = setting(
        5.0,
        "How long a put waits for eviction to make room, or for nodes to come back to a master that was started anew: "
        "three quarters of its timeout at most.",
        unit="seconds",
        minimum=0.0,
        maximum=_HOUR,
    )
    staging_bytes: int = setting(
        128 << 20,
        "Registered memory through which everything goes that is not registered itself. Larger batches go in pieces. "
        "A range of a chunk can be had where the leaves of 256 KiB that it touches fit.",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 40,
    )
    locations_max: int = setting(
        65_536,
        "Chunks whose places are kept for as long as at least half of the lease is left, so that a get of them needs "
        "not ask the master. 0: every get asks.",
        minimum=0,
        maximum=1 << 24,
    )
    batch_chunks: int = setting(4096, "Most chunks in one call to the master.", minimum=1, maximum=1 << 16)
    batch_bytes: int = setting(
        256 << 20,
        "Most bytes of registered memory that are written between two calls to the master, which gives a put a few "
        "seconds to write.",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 40,
    )
    connect_timeout: float = setting(
        0.3, "Longest time to connect to a node.", unit="seconds", minimum=0.01, maximum=60.0
    )
    progress_timeout: float = setting(
        0.5,
        "A node that answers nothing for so long is taken for dead: after it, and the time that the bytes take at "
        "`slowest_rate`, a put goes elsewhere and a get reads another replica.",
        unit="seconds",
        minimum=0.01,
        maximum=60.0,
    )
    slowest_rate: int = setting(
        64 << 20,
        "Bytes in a second that every healthy node takes or gives.",
        unit="bytes",
        minimum=1 << 10,
        maximum=1 << 40,
    )
    avoid: float = setting(
        5.0,
        "How long a segment that failed is avoided by this client, where there is another one.",
        unit="seconds",
        minimum=0.0,
        maximum=_HOUR,
    )
    threads: int = setting(4, "Threads that carry out the `*_async` calls.", minimum=1, maximum=256)
    pending_max: int = setting(
        256, "Most `*_async` calls that may wait; further ones block until one has ended.", minimum=1, maximum=1 << 16
    )

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> StoreClientSettings:
        """Read the settings.

        Raises:
            ConfigError: an unknown name, a wrong type or unit, or an impossible value.
            AddressError: `master` is no address.
        """
        settings = load(cls, "store_client", arguments, file=file, environ=environ)
        parse_addresses(settings.master)
        Tls.of(settings)
        return settings
