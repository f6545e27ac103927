# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what imports vLLM comes after it is known to be there
"""What is quicker to compute is not loaded, and a pool under pressure is given less to do until it is well."""

from __future__ import annotations

import logging
import types
from collections import Counter
from typing import Any

import pytest
from connector_testing import THEIR_WARNINGS, need_vllm
from hypothesis import given
from hypothesis import strategies as st

from moonpool.connector.choice import Choice, Line
from moonpool.connector.settings import ConnectorSettings

need_vllm()

from connector_testing.rig import Rig, rig

pytestmark = THEIR_WARNINGS

PROMPT = [index * 7 % 500 + 3 for index in range(100)]
ADAPTIVE = {"load_choice": "adaptive", "load_probe": 3600.0}


def choice(*, load: float | None = None, compute: float | None = None, **settings: Any) -> Choice:
    """One that has seen so many seconds for 1000 tokens."""
    made = Choice(ConnectorSettings.load({**ADAPTIVE, "load_threads": 1, **settings}), Counter())
    made._probed = float("inf") if settings.get("load_probe") is None else 0.0
    if load is not None:
        made.loading.add(1000, load)
    if compute is not None:
        made.computing.add(1000, compute)
    return made


def output(drafts: dict[str, list[int]] | None = None, **tokens: int) -> Any:
    return types.SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts or {})


@given(st.floats(0.001, 5.0), st.floats(1e-6, 0.1))
def test_a_line_tells_what_is_fixed_from_what_is_for_each_token(fixed: float, slope: float) -> None:
    line = Line()
    assert not line.known
    for tokens in (100, 2000, 500, 3000, 50):
        line.add(tokens, fixed + slope * tokens)
    assert line.seconds(1000) == pytest.approx(fixed + slope * 1000, rel=0.01)
    assert line.fixed == pytest.approx(fixed, rel=0.05, abs=slope)


def test_a_line_goes_by_what_came_last() -> None:
    line = Line()
    for _ in range(50):
        line.add(1000, 10.0)
    for _ in range(50):
        line.add(1000, 1.0)
    assert line.seconds(1000) == pytest.approx(1.0, rel=0.1)
    assert line.fixed == 0.0


def test_a_line_never_falls() -> None:
    line = Line()
    line.add(10, 5.0)
    line.add(1000, 1.0)
    assert line.slope > 0
    assert line.fixed >= 0


def test_what_is_quicker_to_compute_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    assert choice().loads("r", 1000)  # nothing is known
    assert choice(load=9.0).loads("r", 1000)
    assert choice(compute=0.1).loads("r", 1000)
    assert choice(load=0.5, compute=1.0).loads("r", 1000)
    with caplog.at_level(logging.DEBUG, "moonpool.connector.choice"):
        assert not choice(load=2.0, compute=1.0).loads("r", 1000)
    assert "2.0000 s to load (0 of others before them) and 1.0000 s to compute, level 0: compute" in caplog.text


def test_what_is_before_a_load_counts() -> None:
    one = choice(load=0.5, compute=1.0)
    one.load_begins("other", 2000)
    assert not one.loads("r", 1000)
    one.load_ended("other", 2000, 1.0, trouble=False)
    assert one.loads("r", 1000)


def test_only_steps_with_prompts_and_without_loads_are_measured() -> None:
    one = choice()
    for scheduled, waits in (
        (output(a=1, b=1), False),
        (output(a=500), True),
        (output({"a": [1] * 40}, a=41), False),
    ):
        one.step_begins(scheduled, waits=waits)
        one.step_ended()
        assert one.compute_seconds(1) is None
    one.step_begins(output(a=500, b=1), waits=False)
    one.step_ended()
    assert one.compute_seconds(1) is not None
    one.step_ended()  # of a step before it was made


def test_under_pressure_loads_go_one_at_a_time_then_none_and_back() -> None:
    one = choice(load=0.5, compute=1.0)
    one.load_ended("a", 0, 5.0, trouble=True)
    assert one.level == 1
    assert one.loads("r", 1000)
    one.load_begins("r", 1000)
    assert not one.loads("s", 1)
    one.load_ended("r", 0, 5.0, trouble=True)
    assert one.level == 2
    assert not one.loads("t", 1000)
    one._probed = -1e9
    assert one.loads("u", 1000)  # to try
    assert one._counts["load_probes"] == 1
    assert not one.loads("v", 1000)
    one.load_begins("u", 1000)
    one.load_ended("u", 1000, 0.5, trouble=False)
    assert one.level == 1
    for name in "xyz":
        assert one.loads(name, 1000)
        one.load_begins(name, 1000)
        one.load_ended(name, 1000, 0.5, trouble=False)
    assert one.level == 0
    assert one.state["load_level"] == 0


def run(made: Rig) -> None:
    for _ in range(100):
        made.wait_for_lookups()
        made.step()
        for name in list(made.loads):
            made.end_load(name)
        for job_id in list(made.saves):
            made.end_save(job_id)
        for fetch_id in list(made.fetches):
            made.end_fetch(fetch_id)
        if not made.scheduler.has_requests():
            return
    raise AssertionError("requests that never end")


@pytest.mark.parametrize("mode", ["sync", "async", "prefetch"])
def test_in_a_scheduler(mode: str) -> None:
    with rig({"load_mode": mode, **ADAPTIVE}) as made:
        one = made.connector._scheduler._loads.choice
        one._probed = float("inf")
        made.add(PROMPT, outputs=1)
        run(made)
        assert one.computing.known

        def add() -> None:
            # Computing is slow, or a busy machine would give up a prefetch that takes longer.
            one.computing = Line()
            one.computing.add(len(PROMPT), 600.0)
            made.reset()
            made.add(PROMPT, outputs=1)

        for load_seconds, hits in ((1e-6, 1), (1e6, 2)):
            made.load_seconds = load_seconds
            add()
            run(made)
            assert made.counts["hits"] == hits
        # By now it is known how slow loads are.
        add()
        run(made)
        assert made.counts["hits"] == 2
        assert made.counts["misses_slower"] == 1
        one._probed = -1e9
        add()
        run(made)
        assert made.counts["hits"] == 3
        assert made.counts["load_probes"] == 1
        assert not one._under_way
        made.check_end()


def test_a_fetch_is_waited_for_as_long_as_computing_takes() -> None:
    with rig({"load_mode": "prefetch", **ADAPTIVE}) as made:
        made.add(PROMPT, outputs=1)
        run(made)
        made.reset()
        one = made.connector._scheduler._loads.choice
        one.computing = Line()
        one.computing.add(96, 0.5)
        name = made.add(PROMPT, outputs=1)
        made.wait_for_lookups()
        made.step()
        (job,) = made.fetches.values()
        assert job.timeout == pytest.approx(0.5)
        assert not made.block_ids(name)
        made.check_end()
