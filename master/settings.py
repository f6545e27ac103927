# SPDX-License-Identifier: Apache-2.0
"""What can be set about a master, and where each value comes from."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from typing import TYPE_CHECKING, Any, TypedDict

from moonpool._index import SHARDS_MAX
from moonpool.address import parse_address
from moonpool.errors import ConfigError
from moonpool.proto.tls import Tls
from moonpool.settings import load, setting

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MasterOptions", "MasterSettings", "is_loopback"]

_DAY = 86_400.0


class MasterOptions(TypedDict, total=False):
    """The keyword arguments of `Master`, for type checkers. `MasterSettings` says what each one means."""

    listen: str
    advertise: str | None
    http: str | None
    secret: bytes | str | None
    insecure: bool
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    cluster: str
    store: str
    etcd_user: str | None
    etcd_password: bytes | str | None
    etcd_ca: str | None
    etcd_cert: str | None
    etcd_key: str | None
    etcd_timeout: float | str
    etcd_lease: float | str
    etcd_upkeep: bool
    stop_timeout: float | str
    policy: str
    chunks_max: int
    high_watermark: float
    low_watermark: float
    session_timeout: float | str
    heartbeat_interval: float | str
    put_begin: float | str
    put_deadline: float | str
    lease_max: float | str
    ramp_up: float | str
    segment_grace: float | str
    report_window: float | str
    quarantine: float | str
    disk_uses: int
    load_bytes: int | str
    disk_grace: float | str
    drain_rate: int | str
    copy_bytes: int | str
    copies_at_once: int
    copy_deadline: float | str
    events_max: int
    sessions_max: int
    segments_max: int
    namespaces_max: int
    batch_max: int
    shards_max: int


@dataclasses.dataclass(frozen=True)
class MasterSettings:
    """Every setting of a master. Sizes are bytes, durations are seconds.

    Each value is the argument given, else the environment variable ``MOONPOOL_MASTER_<FIELD>``, else the key in the
    table ``[master]`` of the TOML file that ``MOONPOOL_CONFIG`` names, else the default.
    """

    listen: str = setting("127.0.0.1:7600", "Address for nodes and clients. Port 0 picks a free one.")
    advertise: str | None = setting(
        None,
        "Address by which nodes and clients reach this master, when it is not the one it listens on: masters that wait "
        "for their turn name it to them. None: the one it listens on, and with 0.0.0.0 or [::] the name of the host.",
    )
    http: str | None = setting(
        "127.0.0.1:7601",
        "Address for /livez, /healthz, /leader, /metrics and /status over HTTP, which anybody may ask who can reach "
        "it. None serves none.",
    )
    secret: bytes | None = setting(
        None,
        "Cluster secret, the same on every host. Every call proves it; it never crosses the wire. Without TLS, calls "
        "are not encrypted.",
        secret=True,
    )
    insecure: bool = setting(False, "Allow listening beyond loopback without a secret and without TLS.")
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate of this master, and those between it and the authority. With `tls_key` and "
        "`tls_ca` calls go over TLS, and both sides show a certificate.",
    )
    tls_key: str | None = setting(None, "PEM file with the key of `tls_cert`, without a passphrase.")
    tls_ca: str | None = setting(None, "PEM file with the authority that callers' certificates have to come from.")
    cluster: str = setting("moonpool", "The name of the cluster, for people.")
    store: str = setting(
        "sqlite:moonpool.db",
        "Where metadata is kept: sqlite:PATH or etcd:HOST:PORT,HOST:PORT/PREFIX, so that chunks are found again after "
        "a restart, or memory. /PREFIX is /moonpool where it is left out; every key begins with it and the name of the "
        "cluster.",
    )
    etcd_user: str | None = setting(None, "The user that etcd is asked as; none where it asks for none.")
    etcd_password: bytes | None = setting(None, "The password of `etcd_user`.", secret=True)
    etcd_ca: str | None = setting(
        None, "PEM file with the authority that etcd's certificates come from; calls to it go over TLS then."
    )
    etcd_cert: str | None = setting(None, "PEM file with the certificate that is shown to etcd.")
    etcd_key: str | None = setting(None, "PEM file with the key of `etcd_cert`, without a passphrase.")
    etcd_timeout: float = setting(
        0.75,
        "How long a member of etcd has to answer before another one is asked.",
        unit="seconds",
        minimum=0.05,
        maximum=60.0,
    )
    etcd_lease: float = setting(
        3.0,
        "How long a master may be silent before etcd lets another one lead: whole seconds, and no less than 1.5 "
        "elections of etcd. After as long without etcd a master answers nobody until etcd is back.",
        unit="seconds",
        minimum=1.0,
        maximum=600.0,
    )
    etcd_upkeep: bool = setting(
        True,
        "Throw away old revisions in etcd, make its files smaller and take back its alarm about space; false where "
        "somebody else does, as where others keep things in the same etcd.",
    )
    stop_timeout: float = setting(
        5.0,
        "How long a master takes to end at most, when it is told to: a third of it for calls that are under way, and "
        "two for what etcd does not answer. A store that answers is waited for no longer than it needs.",
        unit="seconds",
        minimum=0.3,
        maximum=600.0,
    )
    policy: str = setting("prefix", "Which chunks go first when there is no room.", choices=("prefix", "s3fifo", "lru"))
    chunks_max: int = setting(
        16_777_216,
        "Most chunks. Beyond it puts are refused. One takes up to 200 bytes, and one of R shards counts as R.",
        minimum=1,
        maximum=1 << 31,
    )
    high_watermark: float = setting(
        0.95,
        "Part of the capacity in use from which on chunks are evicted in the background, but none that was put within "
        "twice `put_begin`.",
        minimum=0.0,
        maximum=1.0,
    )
    low_watermark: float = setting(0.90, "Part of the capacity at which that ends.", minimum=0.0, maximum=1.0)
    session_timeout: float = setting(
        10.0,
        "A client or node that is silent for so long is gone: its pins end, its segments are lost.",
        unit="seconds",
        minimum=0.1,
        maximum=_DAY,
    )
    heartbeat_interval: float = setting(
        2.0, "How often clients and nodes say that they are there.", unit="seconds", minimum=0.02, maximum=_DAY
    )
    put_begin: float = setting(
        5.0,
        "How long after it asked for room a client may begin to write there; a put waits for room half as long at "
        "most. After a restart, segments of before take no new chunks for so long, nor for `lease_max`; whoever makes "
        "it smaller leaves the old time between the two masters.",
        unit="seconds",
        minimum=0.05,
        maximum=_DAY,
    )
    put_deadline: float = setting(
        30.0, "How long after it asked for room a client may commit.", unit="seconds", minimum=0.1, maximum=_DAY
    )
    lease_max: float = setting(
        5.0,
        "Longest lease that a reader is given. After a restart segments of before take no new chunks for so long, so "
        "that nothing that was there is overwritten, and puts that do not wait for it are NO_SPACE; whoever makes it "
        "smaller leaves the old time between the two masters.",
        unit="seconds",
        minimum=0.01,
        maximum=_DAY,
    )
    ramp_up: float = setting(
        10.0,
        "A new segment gets its full share of new chunks after this time.",
        unit="seconds",
        minimum=0.0,
        maximum=_DAY,
    )
    segment_grace: float = setting(
        60.0,
        "Segments that have not come back so long after a restart of the master are lost.",
        unit="seconds",
        minimum=0.1,
        maximum=_DAY,
    )
    report_window: float = setting(
        10.0,
        "Clients of two hosts that report a segment within this time have it quarantined, whatever a probe says.",
        unit="seconds",
        minimum=0.01,
        maximum=_DAY,
    )
    quarantine: float = setting(
        5.0,
        "A quarantined segment is used again when nobody has reported it for so long and a node can read there.",
        unit="seconds",
        minimum=0.01,
        maximum=_DAY,
    )
    disk_uses: int = setting(
        2,
        "What was used so often, its put included, is copied to the disk of its node before it leaves memory. So what "
        "is put and never wanted again is not written.",
        minimum=1,
        maximum=5,
    )
    load_bytes: int = setting(
        256 << 20,
        "Bytes that are read from disks into memory at once. What is beyond that waits.",
        unit="bytes",
        minimum=1 << 10,
        maximum=1 << 40,
    )
    disk_grace: float = setting(
        3600.0,
        "A disk whose node has been gone for so long is lost with what is on it. Until then its chunks are misses.",
        unit="seconds",
        minimum=0.1,
        maximum=30 * _DAY,
    )
    drain_rate: int = setting(
        512 << 20,
        "Bytes in a second that leave a segment which is drained, at most. Puts that wait for room come first.",
        unit="bytes",
        minimum=1 << 10,
        maximum=1 << 40,
    )
    copy_bytes: int = setting(
        32 << 20,
        "Bytes that a node is asked to copy at once, when chunks move. One chunk may be larger.",
        unit="bytes",
        minimum=1 << 10,
        maximum=1 << 40,
    )
    copies_at_once: int = setting(
        2, "Copies that a node reads or writes at once, when chunks move.", minimum=1, maximum=64
    )
    copy_deadline: float = setting(
        30.0,
        "How long a node has for a copy. What it has not said to be over keeps its room also afterwards.",
        unit="seconds",
        minimum=0.05,
        maximum=_DAY,
    )
    events_max: int = setting(
        100_000, "Chunks that the events kept for those who watch name, in all.", minimum=16, maximum=1 << 24
    )
    sessions_max: int = setting(16_384, "Most clients and nodes at once.", minimum=1, maximum=1 << 20)
    segments_max: int = setting(16_384, "Most segments at once.", minimum=1, maximum=1 << 20)
    namespaces_max: int = setting(65_536, "Most namespaces that have chunks.", minimum=1, maximum=1 << 24)
    batch_max: int = setting(65_536, "Most chunks of one call.", minimum=1, maximum=1 << 20)
    shards_max: int = setting(64, "Most shards of a chunk.", minimum=1, maximum=SHARDS_MAX)

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> MasterSettings:
        """Read the settings from arguments, environment, file and defaults, in this order.

        Args:
            arguments: values by field name.
            file: the TOML file; None: the one that ``MOONPOOL_CONFIG`` names.
            environ: the environment; None: ``os.environ``.

        Raises:
            ConfigError: an unknown name, a wrong type or unit, an impossible value, or values that do not go together.
            AddressError: `listen`, `advertise` or `http` is not an address.
        """
        settings = load(cls, "master", arguments, file=file, environ=environ)
        settings.check()
        return settings

    def check(self) -> None:
        """See that the values go together.

        Raises:
            ConfigError: they do not.
            AddressError: `listen`, `advertise` or `http` is not an address.
        """
        address = parse_address(self.listen)
        for other in (self.advertise, self.http):
            if other is not None:
                parse_address(other)
        if self.secret is not None and not self.secret:
            raise ConfigError("secret is empty", hint="the cluster's secret, or no secret at all")
        tls = Tls.of(self)
        if self.secret is None and tls is None and not self.insecure and not is_loopback(address.host):
            raise ConfigError(
                f"listen is {self.listen}, beyond loopback, and there is no secret",
                hint="secret=..., tls_cert=..., or insecure=true where everybody who can connect is trusted",
            )
        for less, more in (
            ("low_watermark", "high_watermark"),
            ("heartbeat_interval", "session_timeout"),
            ("put_begin", "put_deadline"),
        ):
            if getattr(self, less) > getattr(self, more):
                raise ConfigError(f"{less} is larger than {more}", hint=f"{less} of {getattr(self, more)} or less")


def is_loopback(host: str) -> bool:
    """Return whether only this host can connect to an address of `host`. Nothing is looked up."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
