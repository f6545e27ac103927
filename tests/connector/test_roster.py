# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""Engines that could do nothing with each other's KV are refused when they start, where the pool knows of both."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing import configs

from moonpool.cluster import LocalCluster, local_cluster
from moonpool.connector import MoonpoolConnector
from moonpool.connector.roster import roster_of
from moonpool.errors import ConfigError

pytestmark = THEIR_WARNINGS

Start = Callable[..., Any]
TP_2 = {"parallel": {"tensor_parallel_size": 2}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(nodes=1, dram="64MiB") as its:
        yield its


@pytest.fixture
def start(cluster: LocalCluster) -> Iterator[Start]:
    """Start the half of a connector in a scheduler. Those of one test have a tenant of their own."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    tenant = uuid.uuid4().hex
    with contextlib.ExitStack() as made:

        def start_(role: str, extra: dict[str, Any] | None = None, **options: Any) -> Any:
            settings = {
                "tenant": tenant,
                "handover_check": 30.0,
                "chunk_tokens": 64,
                "store_client": {"master": cluster.master, **cluster.client_options},
                **(extra or {}),
            }
            config = configs.vllm_config(settings, role=role, **options)
            with set_current_vllm_config(config):
                connector = MoonpoolConnector(config, KVConnectorRole.SCHEDULER, configs.cache_config(config))
            made.callback(connector.shutdown)
            return connector

        yield start_


@pytest.mark.parametrize(("first", "second"), [("kv_producer", "kv_consumer"), ("kv_consumer", "kv_producer")])
def test_other_tensor_parallel_sizes_are_refused_at_start(start: Start, first: str, second: str) -> None:
    start(first, **TP_2)
    with pytest.raises(ConfigError, match="tp is 2 there and 1 here") as caught:
        start(second)
    assert ("decode" if first == "kv_consumer" else "prefill") in str(caught.value)
    assert "handover_check" in caught.value.hint
    # It has left nothing: one of the first kind still finds nobody that it would not fit.
    start(first, **TP_2)


def test_other_types_are_refused_at_start(start: Start) -> None:
    start("kv_producer", dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype is bfloat16 there and float32 here"):
        start("kv_consumer")


def test_engines_that_are_set_up_alike_start(start: Start) -> None:
    for role in ("kv_producer", "kv_consumer", "kv_consumer", "kv_producer"):
        start(role)


def test_one_that_fits_is_enough(start: Start) -> None:
    start("kv_producer", **TP_2)
    start("kv_producer")
    start("kv_consumer")


def test_engines_of_the_same_role_need_nothing_of_each_other(start: Start) -> None:
    start("kv_consumer", **TP_2)
    start("kv_consumer")


def test_one_that_has_ended_does_not_count(start: Start) -> None:
    start("kv_producer", **TP_2).shutdown()
    start("kv_consumer")


def test_an_engine_of_both_roles_needs_nobody(start: Start) -> None:
    start("kv_both", **TP_2)
    start("kv_consumer")
    start("kv_both")


def test_it_can_be_left_to_the_requests(start: Start) -> None:
    start("kv_producer", **TP_2)
    start("kv_consumer", {"handover_check": 0})


def test_other_tenants_and_models_are_others(start: Start) -> None:
    start("kv_producer", **TP_2)
    start("kv_consumer", {"tenant": uuid.uuid4().hex})
    start("kv_consumer", model={**configs.LLAMA, "num_hidden_layers": 2})


@pytest.mark.parametrize("entry", [b"", b"\xff", b"[]", b'{"role": 5}', b'{"role": "kv_producer", "facts": 5}'[:20]])
def test_what_makes_no_sense_is_left_out(cluster: LocalCluster, start: Start, entry: bytes) -> None:
    identity = start("kv_producer")._scheduler._identity
    with cluster.client(roster=(roster_of(identity), entry)):
        start("kv_consumer")


def test_without_a_pool_it_starts(start: Start) -> None:
    began = time.monotonic()
    start("kv_consumer", {"handover_check": 0.2, "store_client": {"master": "127.0.0.1:1"}})
    assert time.monotonic() - began < 10
