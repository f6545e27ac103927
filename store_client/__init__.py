# SPDX-License-Identifier: Apache-2.0
"""The client of a pool: puts chunks of KV cache into it and gets them out again, verified."""

from moonpool.store_client.asking import Removed
from moonpool.store_client.client import StoreClient
from moonpool.store_client.errors import (
    AuthenticationError,
    ChunkBusyError,
    ChunkConflictError,
    ChunkCorruptError,
    ChunkInUseError,
    ChunkNotFoundError,
    ChunkRangeError,
    ChunkTooLargeError,
    ClientClosedError,
    IndexFullError,
    MasterError,
    MasterUnavailableError,
    NodeUnreachableError,
    NoSpaceError,
    SelfTestError,
    StagingFullError,
    StoreArgumentError,
    TlsError,
)
from moonpool.store_client.packing import ROOT
from moonpool.store_client.pins import Pin
from moonpool.store_client.results import GetResults, Outcome, Results
from moonpool.store_client.settings import StoreClientSettings

__all__ = [
    "ROOT",
    "AuthenticationError",
    "ChunkBusyError",
    "ChunkConflictError",
    "ChunkCorruptError",
    "ChunkInUseError",
    "ChunkNotFoundError",
    "ChunkRangeError",
    "ChunkTooLargeError",
    "ClientClosedError",
    "GetResults",
    "IndexFullError",
    "MasterError",
    "MasterUnavailableError",
    "NoSpaceError",
    "NodeUnreachableError",
    "Outcome",
    "Pin",
    "Removed",
    "Results",
    "SelfTestError",
    "StagingFullError",
    "StoreArgumentError",
    "StoreClient",
    "StoreClientSettings",
    "TlsError",
]
