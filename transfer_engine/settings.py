# SPDX-License-Identifier: Apache-2.0
"""What can be set about an engine, and where each value comes from."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, TypedDict

from moonpool.address import parse_address
from moonpool.settings import load, setting
from moonpool.transfer_engine.errors import ConfigError, TransportUnavailableError
from moonpool.transfer_engine.probing import probe

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineOptions", "EngineSettings"]

_UINT32_MAX = 2**32 - 1
# The core's bounds are in cython_ext/src/config.cpp; tests/docs holds the two together.
_SECONDS_MAX = 86_400.0


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `TransferEngine`, for type checkers. `EngineSettings` says what each one means."""

    listen: str | None
    transports: str
    require: str | None
    secret: bytes | str | None
    insecure: bool
    lanes: int | None
    io_threads: int | None
    slice_bytes: int | str | None
    spin_us: int | None
    connect_timeout: float | str | None
    progress_timeout: float | str | None
    deadline: float | str | None
    regions_max: int | None
    peers_max: int | None
    notifications_max: int | None
    rdma_devices: str | None
    rdma_queue_pairs: int
    rdma_queue_pairs_max: int
    rdma_queue_depth: int
    rdma_inline_bytes: int | str
    rdma_service_level: int
    rdma_traffic_class: int
    rdma_pkey_index: int
    rdma_registration_bytes_max: int | str | None
    cuda_staging: bool
    cuda_staging_bytes: int | str


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Every setting of an engine. Sizes are bytes, durations are seconds.

    Each value is the argument given, else the environment variable ``MOONPOOL_ENGINE_<FIELD>``, else the key in the
    table ``[engine]`` of the TOML file that ``MOONPOOL_CONFIG`` names, else the default.
    """

    name: str = setting("engine", "The name this engine shows to its peers and in notifications.")
    listen: str | None = setting(
        "127.0.0.1:0",
        "Address to accept peers on, such as 0.0.0.0:7700 or [::1]:7700. Port 0 picks a free one. None accepts nobody.",
    )
    transports: str = setting(
        "auto",
        "Transports that may be used, separated by commas (local, shm, cuda_ipc, rdma, tcp), or auto for all that this "
        "host has. Nothing else is ever used.",
    )
    require: str | None = setting(
        None, "The one transport every transfer must use. Connecting to a peer over another one fails."
    )
    secret: bytes | None = setting(
        None,
        "Cluster secret, the same on every host. Both sides prove that they know it; it never crosses the wire. "
        "The data itself is not encrypted.",
        secret=True,
    )
    insecure: bool = setting(False, "Allow listening beyond loopback without a secret.")
    lanes: int | None = setting(
        None, "TCP connections to each peer. None chooses from the number of cores.", minimum=1, maximum=64
    )
    io_threads: int | None = setting(
        None, "Threads that drive the sockets. None chooses from the number of cores.", minimum=1, maximum=64
    )
    slice_bytes: int = setting(
        1 << 20,
        "What a lane takes of a large transfer at once. TCP takes more of very large ones, RDMA on several rails less.",
        unit="bytes",
        minimum=64 << 10,
        maximum=32 << 20,
    )
    spin_us: int | None = setting(
        None,
        "Microseconds a waiting thread looks for the result before it sleeps. None lets the engine choose.",
        minimum=0,
        maximum=10_000,
    )
    connect_timeout: float = setting(
        5.0, "Longest time to connect to a peer.", unit="seconds", minimum=0.001, maximum=_SECONDS_MAX
    )
    progress_timeout: float = setting(
        10.0,
        "A lane with work on which no byte moves for so long is taken for broken.",
        unit="seconds",
        minimum=0.001,
        maximum=_SECONDS_MAX,
    )
    deadline: float = setting(
        60.0, "Deadline of a transfer that names none.", unit="seconds", minimum=0.001, maximum=_SECONDS_MAX
    )
    regions_max: int = setting(
        1_048_576, "Most regions that can be registered at once.", minimum=1, maximum=_UINT32_MAX
    )
    peers_max: int = setting(4096, "Most peers that can be connected to this engine.", minimum=1, maximum=1 << 20)
    notifications_max: int = setting(
        65_536,
        "Most notifications that wait to be taken. Each is at most 64 KiB.",
        minimum=1,
        maximum=1 << 24,
    )
    rdma_devices: str | None = setting(
        None,
        "RDMA devices to use, as NAME, NAME:PORT or NAME:PORT@GID_INDEX with commas between, such as "
        "mlx5_0:1@3,mlx5_1. None uses every port that is active, and chooses its GID.",
    )
    rdma_queue_pairs: int = setting(2, "Queue pairs for each peer and rail.", minimum=1, maximum=16)
    rdma_queue_pairs_max: int = setting(
        1024,
        "Queue pairs of one engine for its own transfers. When more are wanted, those that have been idle for longest "
        "are given up, and made again when there is work for them.",
        minimum=1,
        maximum=65536,
    )
    rdma_queue_depth: int = setting(
        256, "Work requests that a queue pair holds, as far as the device has room for them.", minimum=16, maximum=16384
    )
    rdma_inline_bytes: int = setting(
        128,
        "RDMA writes up to this size are copied into their work request, as far as the device can do that.",
        unit="bytes",
        minimum=0,
        maximum=4096,
    )
    rdma_service_level: int = setting(0, "Service level of RDMA packets.", minimum=0, maximum=15)
    rdma_traffic_class: int = setting(
        0,
        "Traffic class of RoCE packets: the DSCP in its upper six bits, such as 104 for DSCP 26.",
        minimum=0,
        maximum=255,
    )
    rdma_pkey_index: int = setting(0, "Place of the partition key in the table of each port.", minimum=0, maximum=65535)
    rdma_registration_bytes_max: int | None = setting(
        None,
        "Larger regions are registered in pieces of this size. None leaves it to what the devices allow.",
        unit="bytes",
        minimum=2 << 20,
        maximum=1 << 40,
    )
    cuda_staging: bool = setting(
        True,
        "Whether memory of a GPU that neither a network adapter nor a copy between GPUs reaches passes through the "
        "host. Without it that is an error: of its registration where there is RDMA, otherwise of the transfer.",
    )
    cuda_staging_bytes: int = setting(
        64 << 20,
        "Pinned host memory for each GPU whose memory no network adapter and no peer reaches by itself, allocated at "
        "the first transfer that needs it.",
        unit="bytes",
        minimum=4 << 20,
        maximum=16 << 30,
    )

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, Any] | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> EngineSettings:
        """Read the settings from arguments, environment, file and defaults, in this order.

        Args:
            arguments: values by field name.
            file: the TOML file; None: the one that ``MOONPOOL_CONFIG`` names.
            environ: the environment; None: ``os.environ``.

        Raises:
            ConfigError: an unknown name, a wrong type or unit, or an impossible value; the hint is the nearest choice.
            AddressError: `listen` is not an address.
            TransportUnavailableError: `transports` or `require` names a transport that this build does not have.
        """
        settings = load(cls, "engine", arguments, file=file, environ=environ)
        settings._check_values()
        return settings

    def check(self) -> None:
        """Hold settings that were made without `load` (``EngineSettings(...)``, ``replace(...)``) to the same rules.

        Raises:
            MoonpoolError: as `load` does. Values with units are texts that only `load` reads.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        read = load(type(self), "engine", given, environ={})
        for name, value in given.items():
            if getattr(read, name) != value:
                raise ConfigError(
                    f"setting {name} is a {type(value).__name__}", hint="EngineSettings.load({...}), which converts it"
                )
        self._check_values()

    def _check_values(self) -> None:
        self._check_transports()
        if self.listen is not None:
            parse_address(self.listen)
        if self.secret is not None and not self.secret:
            raise ConfigError("secret is empty", hint="the cluster's secret, or no secret at all")

    def _check_transports(self) -> None:
        known = [transport.name for transport in probe()]
        named = [] if self.transports == "auto" else [name.strip() for name in self.transports.split(",")]
        if "" in named:
            raise ConfigError(
                f"transports is {self.transports!r}, which has an empty name",
                hint=f"one or more of {', '.join(known)} with one comma between two of them, or auto",
            )
        for name in named:
            _check_transport("transports", name, known, [*known, "auto"])
        if self.require is not None:
            _check_transport("require", self.require, known, known)
            if named and self.require not in named:
                raise ConfigError(
                    f"require is {self.require!r}, which transports={self.transports!r} leaves out",
                    hint=f"transports={self.require!r}",
                )

    def native_arguments(self) -> dict[str, Any]:
        """Return the settings as ``mp_config`` takes them: milliseconds, and its numbers for "choose yourself"."""
        return {
            "name": self.name,
            "listen": self.listen,
            "transports": "".join(self.transports.split()),
            "require": self.require,
            "secret": None if self.secret is None else bytes(self.secret),
            "insecure": self.insecure,
            "lanes": self.lanes or 0,
            "io_threads": self.io_threads or 0,
            "slice_bytes": self.slice_bytes,
            "spin_us": _UINT32_MAX if self.spin_us is None else self.spin_us,
            "connect_timeout_ms": _milliseconds(self.connect_timeout),
            "progress_timeout_ms": _milliseconds(self.progress_timeout),
            "deadline_ms": _milliseconds(self.deadline),
            "regions_max": self.regions_max,
            "peers_max": self.peers_max,
            "notifications_max": self.notifications_max,
            "rdma_devices": self.rdma_devices,
            "rdma_queue_pairs": self.rdma_queue_pairs,
            "rdma_queue_pairs_max": self.rdma_queue_pairs_max,
            "rdma_queue_depth": self.rdma_queue_depth,
            "rdma_inline_bytes": self.rdma_inline_bytes,
            "rdma_service_level": self.rdma_service_level,
            "rdma_traffic_class": self.rdma_traffic_class,
            "rdma_pkey_index": self.rdma_pkey_index,
            "rdma_registration_bytes_max": self.rdma_registration_bytes_max or 0,
            "cuda_staging": self.cuda_staging,
            "cuda_staging_bytes": self.cuda_staging_bytes,
        }


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _check_transport(setting_name: str, name: str, known: list[str], choices: list[str]) -> None:
    if name in known:
        return
    # Imported late: difflib is slow to load and only mistakes need it.
    import difflib

    nearest = difflib.get_close_matches(name, choices, n=1)
    raise TransportUnavailableError(
        f"{setting_name} names {name!r}, which this build does not have",
        hint=nearest[0] if nearest else ", ".join(choices),
    )
