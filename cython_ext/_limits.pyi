# SPDX-License-Identifier: Apache-2.0
from typing_extensions import Buffer

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
    def __init__(self, memory: Buffer, offsets: Buffer, lengths: Buffer, batch: int, streams: int) -> None: ...
    def __len__(self) -> int: ...

class Link:
    def client_run(
        self,
        descriptors: Descriptors,
        op: int,
        mode: int,
        duration_ns: int,
        stop: Buffer | None,
        next_batch: Buffer,
        samples: Buffer | None,
    ) -> tuple[int, int, int, int]: ...
    def server_run(
        self, descriptors: Descriptors, op: int, mode: int, runs: int, next_batch: Buffer
    ) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Link: ...
    def __exit__(self, *exception: object) -> None: ...

def connect(host: str, port: int, token: Buffer, connections: int, timeout_ms: int) -> Link: ...

class Listener:
    port: int
    def __init__(self, host: str, port: int = 0) -> None: ...
    def accept(self, token: Buffer, connections: int, timeout_ms: int) -> Link: ...
    def close(self) -> None: ...
    def __enter__(self) -> Listener: ...
    def __exit__(self, *exception: object) -> None: ...

def copy_run(
    destination: Descriptors,
    source: Descriptors,
    threads: int,
    duration_ns: int,
    stop: Buffer | None,
    next_batch: Buffer,
    samples: Buffer | None,
) -> tuple[int, int, int, int]: ...
