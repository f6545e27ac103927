# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs on Soft-RoCE: of a stand-in driver, whose memory no processor can touch.

The kernel takes it by its address, as it does with nvidia-peermem; a dma-buf it refuses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import DeviceMemory, FakeCuda

from moonpool.transfer_engine import MoonpoolError, Region, TransferEngine
from rdma_lab.inside import CUDA
from rdma_lab.inside.pair import MIB, WAIT, Pair


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    os.environ["MOONPOOL_CUDA_LIBRARY"] = str(CUDA)
    driver = FakeCuda(CUDA)
    driver.start()
    yield driver
    driver.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair("ab")
    try:
        yield made
    finally:
        made.close()


def register(cuda: FakeCuda, engine: TransferEngine, memory: DeviceMemory, name: str | None = None) -> Region:
    with cuda.opened(memory.address, memory.nbytes):
        return engine.register(memory, name)


def test_every_byte_goes_from_gpu_to_gpu(cuda: FakeCuda, pair: Pair) -> None:
    nbytes = 3 * MIB + 4321
    content = np.random.default_rng(11).integers(0, 256, nbytes, np.uint8).tobytes()
    here, there = cuda.memory(content), cuda.memory(bytes(nbytes))
    local = register(cuda, pair.client, here)
    region = register(cuda, pair.server, there, "gpu")
    remote = pair.peer.regions.wait("gpu", WAIT)
    assert pair.client.stats()["regions_peermem"] == 1
    pair.client.write(pair.peer, local, remote, notify=b"written").wait(WAIT)
    assert cuda.peek(there.address, nbytes) == content
    assert cuda.calls("cuFlushGPUDirectRDMAWrites") > 0, "before the notification"
    cuda.poke(here.address, bytes(nbytes))
    pair.client.read(pair.peer, local, remote).wait(WAIT)
    assert cuda.peek(here.address, nbytes) == content
    assert pair.client.stats()["paths"]["rdma"]["completed"] == 2
    region.release()
    local.release()
    for memory in (here, there):
        cuda.free(memory.address)


def test_memory_that_is_not_opened_is_refused_with_both_reasons(cuda: FakeCuda, pair: Pair) -> None:
    memory = cuda.memory(bytes(MIB))
    with pytest.raises(MoonpoolError) as caught:
        pair.client.register(memory)
    assert caught.value.code == "TRANSPORT_UNAVAILABLE"
    assert "nvidia-peermem: the module is not loaded" in str(caught.value.cause)
    assert "dma-buf: device rxe" in str(caught.value.cause)
    cuda.free(memory.address)
