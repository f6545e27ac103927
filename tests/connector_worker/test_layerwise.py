# SPDX-License-Identifier: Apache-2.0
"""Loads layer by layer: a layer is there when the step has waited for it, and what fails fails within the step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from store_testing import keys
from worker_testing import Cache
from worker_testing.faults import breaks, held_in, spoil
from worker_testing.rig import CHUNK_BLOCKS, Rig

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.connector.jobs import LoadJob
from moonpool.connector.layerwise import Layerwise
from moonpool.connector.loading import Load

Rigs = Callable[..., Rig]
LAYERS = 5
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
TIMEOUT = 2.0
SLACK = 12.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """One that a test may break."""
    with local_cluster(nodes=1, dram="64MiB") as cluster:
        yield cluster


def cache(layout: str = "LBHNC", content: int = 256) -> Cache:
    """A layer of a chunk is two leaves, or, with other contents, no whole number of them."""
    return Cache(layout, layers=LAYERS, blocks=16, heads=8, tokens=64, content=content)


def layerwise(rig: Rig, *, drafts: bool = False) -> Layerwise:
    return Layerwise(rig.engine, rig.loads._pool, rig.paged, rig.counts, drafts=drafts)


def job(hashes: list[bytes], blocks: Iterable[int], begin_block: int = 0, timeout: float = 20.0) -> LoadJob:
    return LoadJob(f"r{len(hashes)}", b"".join(hashes), begin_block, list(blocks), False, timeout)


def run(loads: Layerwise, *jobs: LoadJob) -> list[Load]:
    """One step, of which every layer waits."""
    loads.begin(jobs, computes=True)
    for name in NAMES:
        loads.wait_for_layer(name)
    return loads.ended()


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize(("content", "groups"), [(256, 5), (80, 3), (16, 1)])
def test_every_layer_is_there_when_it_was_waited_for(rigs: Rigs, layout: str, content: int, groups: int) -> None:
    writer, reader = rigs(cache=cache(content=content)), rigs(cache=cache(layout, content))
    hashes = writer.put(4)
    loads = layerwise(reader)
    assert len(loads._groups) == groups
    # The second block of the first chunk, the second chunk, the first block of the third; and all of two others.
    jobs = [job(hashes[:3], [7, 9, 2, 15], begin_block=1), job(hashes[2:], [3, 4, 10, 8])]
    loads.begin(jobs, computes=True)
    for layer, name in enumerate(NAMES):
        loads.wait_for_layer(name)
        there, wanted = reader.cache.array(layer), writer.cache.array(layer)
        assert (there[[7, 9, 2, 15]] == wanted[1:5]).all()
        assert (there[[3, 4, 10, 8]] == wanted[4:8]).all()
    ended = loads.ended()
    assert [load.good for load in ended] == [3, 2]
    assert [load.failed_blocks for load in ended] == [[], []]
    for layer in range(LAYERS):
        reader.cache.array(layer)[[7, 9, 2, 15, 3, 4, 10, 8]] = 0
    assert not reader.cache.storage.any()  # nothing else was written to
    assert reader.counted()["loads_ok"] == 2
    assert not loads.ended()


def test_a_step_computes_while_later_layers_come(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = rigs(cache=cache()), rigs(cache=cache())
    hashes = writer.put(2)
    came, go_on = held_in(monkeypatch, "get_into", after=2)
    loads = layerwise(reader)
    loads.begin([job(hashes, range(4))], computes=True)
    assert len(loads) == 1
    loads.wait_for_layer(NAMES[0])
    loads.wait_for_layer(NAMES[1])
    assert came.wait(20)
    assert (reader.cache.array(1)[:4] == writer.cache.array(1)[:4]).all()
    assert not reader.cache.array(2).any()
    assert loads.oldest(time.monotonic()) > 0
    threading.Timer(0.1, go_on.set).start()
    for name in NAMES[2:]:
        loads.wait_for_layer(name)
    assert loads.ended()[0].good == 2
    assert "moonpool-layers" not in {thread.name for thread in threading.enumerate()}
    assert len(loads) == 0


@pytest.mark.parametrize("layer", [0, 3, 4])
def test_a_chunk_that_is_spoilt_in_one_layer_fails_and_all_behind_it(
    rigs: Rigs, cluster: LocalCluster, layer: int
) -> None:
    rig = rigs(cluster, cache=cache())
    hashes = rig.put(4)
    assert rig.link.client is not None
    spoil(rig.link.client, rig, hashes[2], sum(rig.paged.layer_bytes[:layer]) + 5)
    whole, cut = run(layerwise(rig), job(hashes[:2], range(8, 12)), job(hashes, range(1, 8), begin_block=1))
    assert (whole.good, cut.good) == (2, 2)
    assert cut.failed_blocks == [4, 5, 6, 7]
    counted = rig.counted()
    assert counted["loads_ok"] == counted["loads_missing"] == 1
    # A miss where the look at it outlasted its lease.
    assert counted["load_chunks_corrupt"] + counted["load_chunks_missed"] == 1
    assert counted["loads_partial"] == 1


def test_nothing_more_comes_once_every_load_has_failed(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(cache=cache())
    came, _ = held_in(monkeypatch, "get_into", after=1)
    (load,) = run(layerwise(rig), job(keys(2, "absent"), range(4)))
    assert load.good == 0
    assert not came.is_set()
    assert rig.counted()["load_chunks_missed"] == 1


@pytest.mark.parametrize("what", ["kill master", "stop master", "kill node", "stop node"])
def test_a_step_that_the_pool_leaves_alone_between_layers_ends_in_its_time(
    rigs: Rigs, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("MOONPOOL_ENGINE_TRANSPORTS", "tcp")  # memory of a node that was stopped can be read otherwise
    rig = rigs(cluster, cache=cache())
    hashes = rig.put(3)
    wanted = np.array(rig.cache.array(0)[:6])
    rig.cache.fill(9)
    came, go_on = held_in(monkeypatch, "get_into", after=2)
    loads, began = layerwise(rig), time.monotonic()
    loads.begin([job(hashes, range(8, 14), timeout=TIMEOUT)], computes=True)
    loads.wait_for_layer(NAMES[0])
    assert (rig.cache.array(0)[8:14] == wanted).all()
    loads.wait_for_layer(NAMES[1])
    assert came.wait(20)
    breaks(cluster, what)
    go_on.set()
    for name in NAMES[2:]:
        loads.wait_for_layer(name)
    (load,) = loads.ended()
    assert time.monotonic() - began < TIMEOUT + SLACK
    # Where its chunks are is known already, so a load may do without the master.
    assert load.good == (3 if "master" in what and not load.failed_blocks else 0)


def test_what_comes_after_its_time_is_not_believed(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(cache=cache())
    hashes = rig.put(2)
    came, go_on = held_in(monkeypatch, "get_into", after=1)
    loads = layerwise(rig)
    loads.begin([job(hashes, range(8, 12), timeout=1.0)], computes=True)
    for name in NAMES:  # the second layer takes what is left of the time, and then none waits
        loads.wait_for_layer(name)
    assert came.is_set()
    go_on.set()
    (load,) = loads.ended()
    assert (load.good, load.failed_blocks) == (0, [8, 9, 10, 11])
    assert rig.counted()["loads_late"] == 1


def test_layers_that_nobody_waited_for_are_in_doubt(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs(cache=cache())
    hashes = rig.put(2)
    loads = layerwise(rig)
    for waited in ([], NAMES[:-1]):
        loads.begin([job(hashes, range(8, 12))], computes=True)
        for name in waited:
            loads.wait_for_layer(name)
        assert loads.ended()[0].good == 0
    assert caplog.text.count("computed instead") == 1
    # Layers of a draft model come after the step.
    loads = layerwise(rig, drafts=True)
    loads.begin([job(hashes, range(8, 12))], computes=True)
    loads.wait_for_layer(NAMES[0])
    assert loads.ended()[0].good == 2


def test_chunks_of_another_layout_are_not_loaded(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    # As many bytes in each layer, in another shape.
    writer, reader = rigs(cache=Cache(layers=LAYERS, blocks=16, heads=4, tokens=64, content=512)), rigs(cache=cache())
    hashes = writer.put(3)
    for load in run(layerwise(reader), job(hashes, range(8, 14)), job(hashes[:1], [1], begin_block=1)):
        assert load.good == 0
    assert "another layout" in caplog.text


def test_without_a_forward_pass_everything_is_there_at_once(rigs: Rigs) -> None:
    rig = rigs(cache=cache())
    hashes = rig.put(2)
    loads = layerwise(rig)
    loads.begin([job(hashes, range(8, 12))], computes=False)
    assert rig.cache.chunk([8, 9, 10, 11]) == rig.cache.chunk([0, 1, 2, 3])
    assert loads.ended()[0].good == 2


def test_a_layer_of_another_name_waits_for_everything(rigs: Rigs) -> None:
    rig = rigs(cache=cache())
    hashes = rig.put(1)
    loads = layerwise(rig)
    loads.begin([job(hashes, range(8, 8 + CHUNK_BLOCKS))], computes=True)
    loads.wait_for_layer("another")
    assert rig.cache.chunk([8, 9]) == rig.cache.chunk([0, 1])
    for name in NAMES:
        loads.wait_for_layer(name)
    assert loads.ended()[0].good == 1


def test_a_step_ends_when_the_worker_is_shut_down(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(cache=cache())
    hashes = rig.put(1)
    came, go_on = held_in(monkeypatch, "get_into", after=1)
    loads = layerwise(rig)
    loads.begin([job(hashes, range(8, 8 + CHUNK_BLOCKS), timeout=60.0)], computes=True)
    assert came.wait(20)
    rig.link.close()
    go_on.set()
    loads.close()
    assert loads.ended()[0].good == 0
