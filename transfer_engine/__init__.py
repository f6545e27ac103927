# SPDX-License-Identifier: Apache-2.0
"""The transfer engine: registered memory moved between processes and machines.

A `TransferEngine` owns regions of memory, connects to peers, and reads and writes their regions in batches. Every
failure is a `MoonpoolError`; `moonpool.transfer_engine.errors` holds the table of all of them.
"""

from moonpool.transfer_engine.engine import Notification, TransferEngine
from moonpool.transfer_engine.errors import (
    AddressError,
    ArgumentTypeError,
    AuthenticationError,
    BatchError,
    ClosedError,
    ConfigError,
    ConnectError,
    DeadlineError,
    DigestMismatchError,
    ForkedError,
    InternalError,
    InvalidArgumentError,
    LimitError,
    ListenError,
    MoonpoolError,
    NotificationQueueFullError,
    OutOfMemoryError,
    OutOfRangeError,
    PeerLostError,
    ProtocolError,
    RegionBusyError,
    RegionNotFoundError,
    RegionReadOnlyError,
    RegionReleasedError,
    RegionStaleError,
    Status,
    SystemCallError,
    TransferCancelledError,
    TransportUnavailableError,
    VersionMismatchError,
    WaitTimeoutError,
)
from moonpool.transfer_engine.peers import Peer, PeerState, RemoteRegions
from moonpool.transfer_engine.probing import TransportInfo, digest, probe
from moonpool.transfer_engine.regions import Region, RemoteRegion
from moonpool.transfer_engine.settings import EngineSettings
from moonpool.transfer_engine.transfers import Plan, Transfer, TransferState

__all__ = [
    "AddressError",
    "ArgumentTypeError",
    "AuthenticationError",
    "BatchError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "DeadlineError",
    "DigestMismatchError",
    "EngineSettings",
    "ForkedError",
    "InternalError",
    "InvalidArgumentError",
    "LimitError",
    "ListenError",
    "MoonpoolError",
    "Notification",
    "NotificationQueueFullError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "Peer",
    "PeerLostError",
    "PeerState",
    "Plan",
    "ProtocolError",
    "Region",
    "RegionBusyError",
    "RegionNotFoundError",
    "RegionReadOnlyError",
    "RegionReleasedError",
    "RegionStaleError",
    "RemoteRegion",
    "RemoteRegions",
    "Status",
    "SystemCallError",
    "Transfer",
    "TransferCancelledError",
    "TransferEngine",
    "TransferState",
    "TransportInfo",
    "TransportUnavailableError",
    "VersionMismatchError",
    "WaitTimeoutError",
    "digest",
    "probe",
]
