# SPDX-License-Identifier: Apache-2.0
"""Whether what is written into a segment can be read back, through the same address that clients use.

It runs before the segment is offered, so that a node that cuts or spoils bytes never joins.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from moonpool.errors import MoonpoolError
from moonpool.store_client.errors import SelfTestError
from moonpool.transfer_engine import EngineSettings, Region, TransferEngine, digest_batch

__all__ = ["self_test"]

_SEED: Final = 17
#: Bytes of the patterns: around cache lines, pages, leaves of the digest and slices of a transfer, and odd ones.
SIZES: Final = (1, 63, 64, 4095, 4096, 4097, 65_536, 262_144 + 1, (1 << 20) + 13)
_SECONDS: Final = 20.0


def self_test(settings: EngineSettings, address: str, region: Region) -> list[str]:
    """Write and read patterns at both ends of `region` and in its middle, and zero them again.

    Args:
        settings: of the node's engine.
        address: by which clients reach it.
        region: its segment, empty so far.

    Returns:
        The transports that it went over.

    Raises:
        SelfTestError: something did not come back as it was written.
    """
    # "auto" within one process is a plain copy; clients on other hosts come over TCP.
    kinds = ["auto", "tcp"] if settings.transports == "auto" else [settings.transports]
    return [_over(settings, kind, address, region) for kind in kinds]


def _over(settings: EngineSettings, transports: str, address: str, region: Region) -> str:
    own = dataclasses.replace(settings, name="self-test", listen=None, transports=transports)
    try:
        with TransferEngine(settings=own) as engine, engine.connect(address) as peer:
            path = peer.path
            remote = peer.regions.wait(region.name or "", _SECONDS)
            if remote.nbytes != region.nbytes:
                raise SelfTestError(f"the segment has {region.nbytes} bytes, and clients see {remote.nbytes}")
            sizes = [size for size in SIZES if size <= region.nbytes]
            out, back = engine.allocate(max(sizes)), engine.allocate(max(sizes))
            np.frombuffer(memoryview(out), dtype=np.uint8)[:] = np.random.default_rng(_SEED).integers(
                1, 256, max(sizes)
            )
            for size in sizes:
                for at in sorted({0, (region.nbytes - size) // 2 | 1 if size < region.nbytes - 1 else 0,
                                  region.nbytes - size}):  # fmt: skip
                    engine.write(peer, out, remote, 0, at, size, deadline=_SECONDS).wait()
                    engine.read(peer, back, remote, 0, at, size, deadline=_SECONDS, digest=True).wait()
                    _compare(path, out, back, region, at, size)
    except SelfTestError:
        raise
    except MoonpoolError as error:
        raise SelfTestError(
            "the self-test of the segment failed",
            peer=address,
            cause=str(error),
            hint="whether clients can reach this address (listen, advertise), and the log of the engine",
        ) from error
    return path


def _compare(path: str, out: Region, back: Region, region: Region, at: int, size: int) -> None:
    wanted = digest_batch(out, 0, size)
    memory = np.frombuffer(memoryview(region), dtype=np.uint8)
    for what, found in (("came back", digest_batch(back, 0, size)), ("lies there", digest_batch(region, at, size))):
        if found != wanted:
            raise SelfTestError(
                f"of {size} bytes written at {at} something else {what}", path=path, hint="another transport, other RAM"
            )
    memory[at : at + size] = 0
