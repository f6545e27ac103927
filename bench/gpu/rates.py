# SPDX-License-Identifier: Apache-2.0
"""Rates beside those of the driver alone."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from moonpool.bench.gpu.other import DEADLINE_S, Other
from moonpool.bench.gpu.run import MIB, Plan, Run
from moonpool.transfer_engine import TransferEngine, copy_batch
from moonpool.units import format_bytes

__all__ = ["gather", "sweep"]

_KIB: Final = 1 << 10


def rates(plan: Plan, contenders: dict[str, Callable[[], object]], nbytes: int) -> dict[str, list[float]]:
    """Return bytes per second of each in every round; they take turns within a round."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for once in contenders.values():
        once()
    for _ in range(plan.rounds):
        for name, once in contenders.items():
            begin, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - begin < plan.round_s:
                once()
                count += 1
            found[name].append(count * nbytes / (time.perf_counter() - begin))
    return found


def measure(run: Run, name: str, nbytes: int, ours: Callable[[], object], limit: tuple[str, Callable[[], object]],
            bar: float | None) -> None:  # fmt: skip
    """Note a rate beside what is its limit."""
    found = rates(run.plan, {"ours": ours, "limit": limit[1]}, nbytes)
    ratio = statistics.median(mine / theirs for mine, theirs in zip(found["ours"], found["limit"], strict=True))
    rate, most = (statistics.median(found[which]) / 1e9 for which in ("ours", "limit"))
    run.rows.append({
        "row": name, "bytes": nbytes, "gbytes_per_s": rate, "limit": limit[0], "limit_gbytes_per_s": most,
        "ratio": ratio, "bar": bar,
    })  # fmt: skip
    figure = f"{rate:.2f} GB/s, {ratio:.2f} of {most:.2f} GB/s ({limit[0]})"
    if bar is None or not run.plan.judged:
        run.note(name, "shown", figure)
    else:
        run.note(name, "passed" if ratio >= bar else "failed", figure, f"{bar:.2f}")


def sweep(run: Run, other: Other) -> None:
    """Measure copies between host and GPU, and between two processes."""
    driver, nbytes = run.driver, run.plan.nbytes
    sizes = [size for size in (64 * _KIB, MIB, 16 * MIB, 64 * MIB) if size <= nbytes]
    with (
        driver.memory(nbytes) as address, driver.memory(nbytes) as second, driver.pinned(nbytes) as pinned,
        TransferEngine("gpu-check", listen=None, transports="cuda_ipc,tcp") as engine,
    ):  # fmt: skip
        region = engine.register((address, nbytes, f"cuda:{driver.device}"))
        as_pinned = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pinned))
        peer = engine.connect(other.address, timeout=DEADLINE_S)
        remote = peer.regions.wait("gpu", DEADLINE_S)
        for size in sizes:
            text = format_bytes(size)
            bar = 0.90 if size == 16 * MIB else None
            for kind, host in (("", as_pinned), (", not pinned", np.zeros(nbytes, np.uint8))):
                for name, ours, to, source in (
                    ("H2D", lambda: copy_batch(region, 0, host, 0, size), address, pinned),  # noqa: B023 - now
                    ("D2H", lambda: copy_batch(host, 0, region, 0, size), pinned, address),  # noqa: B023
                ):
                    limit = ("pinned cuMemcpyAsync", lambda: driver.copies(to, source, size, 1))  # noqa: B023
                    measure(run, f"{name} {text}{kind}", size, ours, limit, None if kind else bar)
            limit = ("cuMemcpyAsync of one process", lambda: driver.copies(second, address, size, 1))  # noqa: B023
            measure(
                run, f"between processes {text}", size,
                lambda: engine.read(peer, region, remote, 0, 0, size).wait(DEADLINE_S),  # noqa: B023
                limit, 0.90 if size == 64 * MIB else None,
            )  # fmt: skip


def gather(run: Run) -> None:
    """Measure scattered pieces of one memory to a contiguous other one, and back."""
    driver, nbytes = run.driver, run.plan.nbytes // 2
    with (
        driver.memory(2 * nbytes) as cache, driver.memory(nbytes) as chunk, driver.pinned(nbytes) as pinned,
        TransferEngine("gpu-check", listen=None, transports="tcp") as engine,
    ):  # fmt: skip
        paged = engine.register((cache, 2 * nbytes, f"cuda:{driver.device}"))
        whole = engine.register((chunk, nbytes, f"cuda:{driver.device}"))
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pinned))
        for size in (16 * _KIB, 32 * _KIB, 64 * _KIB, 128 * _KIB, 256 * _KIB, 512 * _KIB, MIB, 2 * MIB):
            count = nbytes // size
            blocks = np.random.default_rng(5).permutation(2 * count)[:count] * size
            pieces = np.arange(count) * size
            for name, ours, to, source, bar in (
                ("gather", lambda: copy_batch(whole, pieces, paged, blocks, size), chunk, cache, 0.80),  # noqa: B023
                ("scatter", lambda: copy_batch(paged, blocks, whole, pieces, size), cache, chunk, 0.80),  # noqa: B023
                ("gather to host", lambda: copy_batch(host, pieces, paged, blocks, size), pinned, cache, None),  # noqa: B023
                ("scatter from host", lambda: copy_batch(paged, blocks, host, pieces, size), cache, pinned, None),  # noqa: B023
            ):
                limit = ("contiguous cuMemcpyAsync", lambda: driver.copies(to, source, nbytes, 1))  # noqa: B023
                judged = bar if size == 32 * _KIB else None
                measure(run, f"{name}, {count} of {format_bytes(size)}", nbytes, ours, limit, judged)
