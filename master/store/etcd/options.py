# SPDX-License-Identifier: Apache-2.0
"""Where an etcd is, who asks it, and how long it may take."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from moonpool.address import Address, parse_address
from moonpool.errors import AddressError, ConfigError

if TYPE_CHECKING:
    from moonpool.master.settings import MasterSettings

__all__ = ["EtcdOptions"]

_HINT: Final = "etcd:10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379, and /PREFIX behind that if it is not /moonpool"
_PREFIX: Final = "moonpool"
# Names in keys are those that need no quotes in a shell.
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}(/[A-Za-z0-9._-]{1,64}){0,7}")


@dataclass(frozen=True)
class EtcdOptions:
    """What an `EtcdStore` needs to know.

    Attributes:
        endpoints: of the members, for clients.
        root: what every key begins with: ``/PREFIX/CLUSTER``.
        user: None: etcd asks for none.
        password: of `user`.
        ca: PEM file with the authority of etcd's certificates; None: no TLS.
        cert: PEM file with the certificate of this master, where etcd asks for one.
        key: PEM file with its key.
        timeout: seconds that one attempt of a call has, at first. Another member is asked then.
        lease: seconds after which another master may take over from one that is silent.
        upkeep: compact, defragment and disarm the alarm about space.
        closing: seconds that the store has, when it is closed, for what etcd has not answered.
    """

    endpoints: tuple[Address, ...]
    root: str = f"/{_PREFIX}/moonpool"
    user: str | None = None
    password: bytes | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    timeout: float = 0.75
    lease: float = 3.0
    upkeep: bool = True
    closing: float = 5.0

    @classmethod
    def parse(cls, text: str, settings: MasterSettings | None = None) -> EtcdOptions:
        """Return what a setting says: ``HOST:PORT[,HOST:PORT...][/PREFIX]``.

        Raises:
            ConfigError: it says nothing that makes sense, or other settings do not go with it.
        """
        places, slash, prefix = text.partition("/")
        try:
            endpoints = tuple(parse_address(place) for place in places.split(","))
        except AddressError as error:
            raise ConfigError(f"store is {f'etcd:{text}'!r}", cause=error.message, hint=_HINT) from error
        cluster = "moonpool" if settings is None else settings.cluster
        root = f"{prefix.rstrip('/') if slash else _PREFIX}/{cluster}"
        if not _NAME.fullmatch(root):
            raise ConfigError(
                f"the keys in etcd would begin with {root!r}",
                hint="a prefix and a cluster's name of letters, digits and . _ -",
            )
        if settings is None:
            return cls(endpoints, f"/{root}")
        return cls(
            endpoints,
            f"/{root}",
            settings.etcd_user,
            settings.etcd_password,
            settings.etcd_ca,
            settings.etcd_cert,
            settings.etcd_key,
            settings.etcd_timeout,
            settings.etcd_lease,
            settings.etcd_upkeep,
            settings.stop_timeout / 3,
        )

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise ConfigError("etcd_user and etcd_password go together", hint="both, or none")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("etcd_cert and etcd_key go together", hint="both, or none")
        if self.cert is not None and self.ca is None:
            raise ConfigError("etcd_cert without etcd_ca", hint="the authority that etcd's certificates come from")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return what a channel needs; None: no TLS.

        Raises:
            ConfigError: a file cannot be read.
        """
        if self.ca is None:
            return None
        authority, key, cert = (_read(name, getattr(self, name)) for name in ("ca", "key", "cert"))
        return grpc.ssl_channel_credentials(authority, key, cert)


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"etcd_{name}: {path} cannot be read", cause=error.strerror or str(error), hint="a file in PEM format"
        ) from error
    if b"-----BEGIN" not in found:
        raise ConfigError(f"etcd_{name}: {path} is no PEM", hint="a file in PEM format")
    return found
