# SPDX-License-Identifier: Apache-2.0
from typing import Any, TypeAlias

from typing_extensions import Self

# Anything with a contiguous buffer of the right type. Type checkers do not know numpy's arrays as buffers before
# Python 3.12, hence not collections.abc.Buffer.
Array: TypeAlias = Any

TOKEN_BYTES: int
CONNECTIONS_MAX: int
STREAMS_MAX: int
SHARE_BYTES_MIN: int
READ: int
WRITE: int
ACKED: int
STREAM: int

class LimitError(Exception):
    code: str
    errno: int
    def __init__(self, code: str, errno: int, message: str) -> None: ...

class Descriptors:
    def __init__(self, memory: Array, offsets: Array, lengths: Array, batch: int, streams: int) -> None: ...
    @staticmethod
    def of_process(
        address: int, nbytes: int, offsets: Array, lengths: Array, batch: int, streams: int
    ) -> Descriptors: ...
    def __len__(self) -> int: ...

class Link:
    def client_run(
        self,
        descriptors: Descriptors,
        op: int,
        mode: int,
        duration_ns: int,
        stop: Array,
        next_batch: Array,
        samples: Array,
    ) -> tuple[int, int, int, int]: ...
    def server_run(self, descriptors: Descriptors, op: int, mode: int, runs: int, next_batch: Array) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def connect(host: str, port: int, token: Array, connections: int, timeout_ms: int) -> Link: ...

class Listener:
    port: int
    def __init__(self, host: str, port: int = 0) -> None: ...
    def accept(self, token: Array, connections: int, timeout_ms: int) -> Link: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def copy_run(
    destination: Descriptors,
    source: Descriptors,
    threads: int,
    duration_ns: int,
    stop: Array,
    next_batch: Array,
    samples: Array,
) -> tuple[int, int, int, int]: ...
def process_run(
    pid: int,
    own: Descriptors,
    other: Descriptors,
    op: int,
    threads: int,
    duration_ns: int,
    stop: Array,
    next_batch: Array,
    samples: Array,
) -> tuple[int, int, int, int]: ...
