# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this suite: the stand-in for libcuda in this process, and engines that find it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from cuda_testing.ends import Connect, OpenEngine, connected
from fake_cuda import FakeCuda, library

from moonpool.transfer_engine import TransferEngine


@pytest.fixture(scope="session")
def driver() -> FakeCuda:
    """The library, with two devices."""
    # The engine opens the library once in a process, and forgets nothing of it.
    path = library()
    os.environ["MOONPOOL_CUDA_LIBRARY"] = str(path)
    fake = FakeCuda(path)
    fake.set("devices=2")
    return fake


@pytest.fixture
def cuda(driver: FakeCuda) -> Iterator[FakeCuda]:
    """The stand-in with a context on this thread, as torch would have it. What a test leaves behind fails it."""
    kinds = ("streams", "events", "pinned", "imports", "contexts")
    driver.set("fail=;delay_us=0;ns_per_kib=0")
    driver.start()
    before = {kind: driver.alive(kind) for kind in kinds}
    yield driver
    driver.set("fail=;delay_us=0;ns_per_kib=0")
    after = {kind: driver.alive(kind) for kind in kinds}
    driver.stop()
    assert after == before


@pytest.fixture
def open_cuda_engine(cuda: FakeCuda) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def open_one(name: str = "engine", **options: Any) -> TransferEngine:
            return stack.enter_context(TransferEngine(name, **{"transports": "tcp", **options}))

        yield open_one


@pytest.fixture
def connect(cuda: FakeCuda, open_cuda_engine: OpenEngine) -> Iterator[Connect]:
    """Opens engines with the sides named, such as "dh": a device here, the host there."""
    yield from connected(cuda, open_cuda_engine)
