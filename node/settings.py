# SPDX-License-Identifier: Apache-2.0
"""What can be set about a store node."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from moonpool.address import parse_address, parse_addresses
from moonpool.node.slab import SlabPlace
from moonpool.proto.tls import Tls
from moonpool.settings import load, setting

__all__ = ["NodeSettings"]


@dataclasses.dataclass(frozen=True)
class NodeSettings:
    """Every setting of a node. Sizes are bytes, durations are seconds.

    Each value is the argument given, else the environment variable ``MOONPOOL_NODE_<FIELD>``, else the key in the
    table ``[node]`` of the TOML file that ``MOONPOOL_CONFIG`` names, else the default.
    """

    master: str = setting("127.0.0.1:7600", "Address of the master, or of several with commas between them.")
    dram: int = setting(
        8 << 30,
        "Memory that this node lends to the pool: no more than the host has.",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 50,
    )
    ssd: str | None = setting(
        None,
        "A file, or a folder for one, and how much of the disk it takes: /mnt/nvme:100GiB. What is used again is kept "
        "there when it has to leave memory. All of the space is taken at the start. None: no disk.",
    )
    ssd_threads: int = setting(8, "Reads and writes of the disk that are under way at once.", minimum=1, maximum=256)
    name: str | None = setting(None, "What the master and the clients call this node. None: the host name.")
    host_id: str | None = setting(None, "What tells hosts apart: replicas go to different ones. None: the host name.")
    listen: str = setting("127.0.0.1:0", "Address to accept clients on, such as 0.0.0.0:7900. Port 0 picks a free one.")
    advertise: str | None = setting(
        None,
        "Address by which clients reach this node, when it is not the one it listens on. None: the one it listens on, "
        "and with 0.0.0.0 or [::] the one that leads to the master.",
    )
    secret: bytes | None = setting(
        None, "Cluster secret, the same for master, nodes and clients. It never crosses the wire.", secret=True
    )
    insecure: bool = setting(False, "Allow listening beyond loopback without a secret.")
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate of this node, and those between it and the authority. With `tls_key` and "
        "`tls_ca` calls go over TLS, and both sides show a certificate.",
    )
    tls_key: str | None = setting(None, "PEM file with the key of `tls_cert`, without a passphrase.")
    tls_ca: str | None = setting(None, "PEM file with the authority that the master's certificate has to come from.")
    tls_name: str | None = setting(
        None, "Name that the certificate of the master is for. None: the host of its address, as a name or as an IP."
    )
    huge_pages: str = setting(
        "auto",
        "Pages of 2 MiB: auto takes them where the kernel offers them, required fails without, never takes none.",
        choices=("auto", "required", "never"),
    )
    transports: str = setting("auto", "As the setting transports of the engine.")
    startup_timeout: float = setting(
        10.0, "Longest time to reach the master at the start.", unit="seconds", minimum=0.01, maximum=3600.0
    )
    self_test: bool = setting(
        True, "Write and read back patterns through the engine before the memory is offered. Only tests go without."
    )

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> NodeSettings:
        """Read the settings.

        Raises:
            ConfigError: an unknown name, a wrong type or unit, or an impossible value.
            AddressError: one of the addresses is none.
        """
        settings = load(cls, "node", arguments, file=file, environ=environ)
        parse_addresses(settings.master)
        for address in (settings.listen, settings.advertise):
            if address is not None:
                parse_address(address)
        Tls.of(settings)
        if settings.ssd is not None:
            SlabPlace.parse(settings.ssd)
        return settings
