# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""What vLLM finds: by name or by path, with its load failure policy, inside another connector."""

from __future__ import annotations

import copy
import types
from typing import Any
from unittest import mock

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm

need_vllm()

from connector_testing import configs
from connector_testing.rig import rig

from moonpool.connector import MoonpoolConnector
from moonpool.connector.metadata import MoonpoolMetadata
from moonpool.connector.plugin import register
from moonpool.connector.worker import WorkerSide
from moonpool.errors import ConfigError

pytestmark = THEIR_WARNINGS


def made(role: str, config: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return MoonpoolConnector(config, KVConnectorRole[role], configs.cache_config(config))


def test_it_is_known_by_its_name_once_registered() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    # MultiConnector looks for the statistics of a connector under the name of its class.
    found = KVConnectorFactory.get_connector_class_by_name(MoonpoolConnector.__name__)
    assert found is MoonpoolConnector


def test_what_cannot_be_loaded_is_computed_whatever_the_default_is() -> None:
    with rig(transfer={"kv_load_failure_policy": "fail"}) as engine:
        assert engine.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert engine.scheduler.recompute_kv_load_failures


def test_inside_another_connector_its_policy_has_to_be_set() -> None:
    from vllm.config import set_current_vllm_config

    outer = configs.vllm_config()
    outer.kv_transfer_config.kv_connector = "MultiConnector"
    inner = copy.copy(outer)
    inner.kv_transfer_config = configs.vllm_config().kv_transfer_config
    with (
        set_current_vllm_config(outer),
        pytest.raises(ConfigError, match='Try: "kv_load_failure_policy": "recompute" beside "kv_connector"'),
    ):
        made("WORKER", inner)
    outer.kv_transfer_config.kv_load_failure_policy = "recompute"
    with set_current_vllm_config(outer):
        made("WORKER", inner).shutdown()


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"chunk_token": 64}, "chunk_tokens"),
        ({"store_client": "127.0.0.1:7600"}, '"store_client": {"master": "host:port"}'),
        ({"store_client": {"mastr": "127.0.0.1:7600"}}, "master"),
        ({"load_mode": "later"}, "async"),
        ({"chunk_tokens": 100}, '"chunk_tokens": 96'),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_is_right(role: str, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(role, configs.vllm_config(extra))
    assert words in str(caught.value)


def test_a_cache_owes_nobody_a_delivery() -> None:
    with rig(role="kv_producer") as engine:
        assert not engine.scheduler.requires_kv_delivery


def test_another_first_hash_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with rig():
        assert "PYTHONHASHSEED is '7'" in caplog.text


@pytest.mark.parametrize("computes", [False, True])
def test_a_step_without_a_forward_pass_begins_saves_when_loads_begin(computes: bool) -> None:
    """Before vLLM 0.31 it is the only hook of such a step that has the metadata."""
    connector = MoonpoolConnector.__new__(MoonpoolConnector)
    connector._worker = worker = mock.create_autospec(WorkerSide, instance=True)
    connector._connector_metadata = metadata = MoonpoolMetadata()
    connector.start_load_kv(types.SimpleNamespace(attn_metadata={} if computes else None))
    worker.start_load.assert_called_once_with(metadata, computes=computes)
    assert worker.wait_for_save.call_args_list == ([] if computes else [mock.call(metadata)])


def test_statistics_go_from_process_to_process() -> None:
    stats = MoonpoolConnector.build_kv_connector_stats({"hits": 1, "lookups_waiting": 3})
    both = stats.aggregate(MoonpoolConnector.build_kv_connector_stats({"hits": 2, "lookups_waiting": 1}))
    assert both.data == {"hits": 3, "lookups_waiting": 3}
    assert MoonpoolConnector.build_kv_connector_stats().is_empty()


@pytest.mark.parametrize("mode", ["sync", "layerwise", "async", "prefetch", "off"])
def test_only_what_waits_for_layers_needs_graphs_in_pieces(mode: str) -> None:
    extra = {"load_mode": mode, "store_client": {"master": "127.0.0.1:1"}}
    assert MoonpoolConnector.requires_piecewise_for_cudagraph(extra) == (mode == "layerwise")
