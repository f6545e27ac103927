# SPDX-License-Identifier: Apache-2.0
"""Both processes build the same descriptor list from a few numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.errors import ControlError
from moonpool.bench.work import Layout, Tuning, Work, mix

WORK = Work("tcp", "read", 4096, 4, "sequential", 1, None, 1 << 20)


@st.composite
def works(draw: st.DrawFn) -> Work:
    block, batch, threads = draw(st.integers(1, 64)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    footprint = block * batch * threads * draw(st.integers(1, 20)) + draw(st.integers(0, 63))
    order, op = draw(st.sampled_from(["sequential", "random"])), draw(st.sampled_from(["read", "write"]))
    return Work("tcp", op, block, batch, order, threads, None, footprint)


@given(works())
def test_batches_of_all_threads_tile_the_blocks(work: Work) -> None:
    layout = Layout(work, target=True)
    seen = [
        block
        for thread in range(work.threads)
        for index in range(work.batches)
        for block in range(work.blocks)[layout.batch(thread, index)]
    ]
    assert seen == list(range(work.blocks))
    assert layout.batch(0, work.batches) == layout.batch(0, 0), "batches repeat"


@given(works())
def test_every_block_has_a_place_of_its_own_inside_the_footprint(work: Work) -> None:
    for target in (False, True):
        offsets = sorted(Layout(work, target=target).offsets.tolist())
        assert offsets == [index * work.block_bytes for index in range(work.blocks)]
        assert offsets[-1] + work.block_bytes <= work.footprint_bytes


def test_random_order_differs_between_the_sides_and_is_the_same_every_time() -> None:
    work = dataclasses.replace(WORK, order="random")
    ours, theirs = Layout(work, target=False).places, Layout(work, target=True).places
    assert not np.array_equal(ours, theirs)
    # Fixed for good: two versions of numpy, or of this program, must agree.
    assert ours[:8].tolist() == Layout(work, target=False).places[:8].tolist()
    assert theirs[:6].tolist() == [115, 203, 198, 172, 242, 156]
    assert mix(np.arange(2, dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_travels_as_json() -> None:
    assert Work.from_json(WORK.to_json()) == WORK
    tuned = dataclasses.replace(WORK, tuning=Tuning(devices="mlx5_0", queue_pairs=4, spin_us=0))
    assert Work.from_json(tuned.to_json()) == tuned


def test_each_side_has_its_own_devices_and_the_settings_of_both() -> None:
    tuning = Tuning("mlx5_0", "mlx5_1", 4, 1 << 20, 0, 50)
    shared = {"rdma_queue_pairs": 4, "slice_bytes": 1 << 20, "rdma_inline_bytes": 0, "spin_us": 50}
    assert tuning.settings(target=False) == {"rdma_devices": "mlx5_0", **shared}
    assert tuning.settings(target=True) == {"rdma_devices": "mlx5_1", **shared}
    assert Tuning().settings(target=True) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"op": "swap"},
        {"order": "backwards"},
        {"block_bytes": 0},
        {"batch": -1},
        {"threads": "1"},
        {"footprint_bytes": 4096},
        {"lanes": True},
        {"transport": 1},
        {"surprise": 1},
        {"tuning": None},
        {"tuning": {"devices": "mlx5_0"}},
        {"tuning": {**dataclasses.asdict(Tuning()), "queue_pairs": "4"}},
        {"tuning": {**dataclasses.asdict(Tuning()), "devices": 1}},
    ],
)
def test_refuses_a_work_it_cannot_do(change: dict[str, Any]) -> None:
    with pytest.raises(ControlError):
        Work.from_json({**WORK.to_json(), **change})
    with pytest.raises(ControlError):
        Work.from_json([])
