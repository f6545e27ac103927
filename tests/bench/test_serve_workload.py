# SPDX-License-Identifier: Apache-2.0
"""What servers are asked: the same of all, another in each round, and as long as was said."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from bench_testing.llm_server import in_common
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.errors import UsageError
from moonpool.bench.replay.trace import Trace, read_trace
from moonpool.bench.serve.speech import TOKENS_FIRST, Script, TokenSpelling, WordSpelling
from moonpool.bench.serve.workload import MultiTurn, Seed, SharedPrefix, TraceWork, Workload

SEEDS = st.builds(Seed, st.integers(0, (1 << 32) - 1), st.integers(1, 1000))
MULTI_TURN = st.builds(
    MultiTurn, st.integers(1, 6), st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.just(0.5)
)
SHARED = st.builds(
    SharedPrefix, st.integers(1, 4), st.integers(1, 12), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)
)
ANSWER = [7, 8, 9]


def prompts(workload: Workload, seed: Seed, *, vocabulary: int = 512) -> list[list[list[int]]]:
    """All prompts of a round, where every answer is `ANSWER`."""
    spelling = TokenSpelling(seed, vocabulary)
    spoken = []
    for number, conversation in enumerate(workload.conversations(seed, None)):
        script = Script(spelling, number)
        said = []
        for turn in conversation.turns:
            said.append(list(script.say(turn)))
            assert script.answered(ANSWER, "", len(ANSWER))
        spoken.append(said)
    return spoken  # type: ignore[return-value]  # token ids, as asked


@given(st.one_of(MULTI_TURN, SHARED), SEEDS)
def test_a_seed_says_everything(workload: Workload, seed: Seed) -> None:
    assert workload.conversations(seed, 2.0) == workload.conversations(seed, 2.0)
    assert prompts(workload, seed) == prompts(workload, seed)


@given(MULTI_TURN, SEEDS)
def test_each_turn_goes_on_from_the_one_before_and_its_answer(workload: MultiTurn, seed: Seed) -> None:
    spoken = prompts(workload, seed)
    assert [len(said) for said in spoken] == [workload.turns] * workload.users
    for said in spoken:
        for before, after in itertools.pairwise(said):
            assert after[: len(before) + len(ANSWER)] == before + ANSWER
        assert [len(prompt) for prompt in said] == [
            (turn + 1) * workload.turn_tokens + turn * len(ANSWER) for turn in range(workload.turns)
        ]
        assert all(TOKENS_FIRST <= token < 512 for prompt in said for token in prompt if token not in ANSWER)


@given(SHARED, SEEDS)
def test_prefixes_are_shared_within_groups_and_nothing_else_is(workload: SharedPrefix, seed: Seed) -> None:
    # So many different tokens that two texts which ought to differ do.
    spoken = [prompt for (prompt,) in prompts(workload, seed, vocabulary=1 << 30)]
    prefixes = [tuple(prompt[: workload.prefix_tokens]) for prompt in spoken]
    counts = sorted(prefixes.count(prefix) for prefix in set(prefixes))
    assert len(counts) == min(workload.groups, workload.requests)
    assert counts[-1] - counts[0] <= 1
    assert len({tuple(prompt[workload.prefix_tokens :]) for prompt in spoken}) == workload.requests
    assert {len(prompt) for prompt in spoken} == {workload.prefix_tokens + workload.suffix_tokens}


@given(st.one_of(MULTI_TURN, SHARED), SEEDS, st.integers(1001, 2000))
def test_another_round_shares_no_beginning(workload: Workload, seed: Seed, other: int) -> None:
    ours = [said[0] for said in prompts(workload, seed, vocabulary=1 << 30)]
    theirs = [said[0] for said in prompts(workload, Seed(seed.run, other), vocabulary=1 << 30)]
    assert not {prompt[0] for prompt in ours} & {prompt[0] for prompt in theirs}


@given(SEEDS, st.floats(0.1, 1000))
def test_arrivals_are_in_order_and_as_often_as_was_said(seed: Seed, rate: float) -> None:
    due = [one.due_s for one in SharedPrefix(1, 2000, 1, 1, 1).conversations(seed, rate)]
    assert due == sorted(due)
    # Seven standard deviations of a Poisson process.
    assert abs(due[-1] * rate / 2000 - 1) < 7 / 2000**0.5


def test_users_think_as_long_as_was_said_on_average() -> None:
    thinking = [
        turn.think_s for one in MultiTurn(500, 5, 1, 1, 3.0).conversations(Seed(1, 1), None) for turn in one.turns
    ]
    assert sum(thinking) / len(thinking) == pytest.approx(3.0, rel=7 / len(thinking) ** 0.5)
    assert {
        turn.think_s for one in MultiTurn(2, 2, 1, 1, 0.0).conversations(Seed(1, 1), None) for turn in one.turns
    } == {0.0}


def test_text_is_a_word_for_each_token_and_goes_on_from_text() -> None:
    (conversation,) = MultiTurn(1, 2, 5, 3, 0.0).conversations(Seed(1, 1), None)
    script = Script(WordSpelling(Seed(1, 1)), 0)
    first = script.say(conversation.turns[0])
    assert isinstance(first, str)
    assert len(first.split()) == 5
    assert script.answered([1, 2], " and so on", 2)
    second = script.say(conversation.turns[1])
    assert isinstance(second, str)
    assert second.startswith(f"{first} and so on ")
    assert len(second.split()) == 13


def test_stand_ins_are_as_long_as_the_answer_and_known_as_such() -> None:
    (conversation,) = MultiTurn(1, 2, 5, 3, 0.0).conversations(Seed(1, 1), None)
    script = Script(TokenSpelling(Seed(1, 1), 512), 0)
    script.say(conversation.turns[0])
    assert not script.answered([], "told as text alone", 3)
    assert len(script.say(conversation.turns[1])) == 13


def write(file: Path, requests: list[tuple[float, int, int, list[int]]]) -> Trace:
    file.write_text(
        "\n".join(
            json.dumps({"timestamp": time_ms, "input_length": tokens, "output_length": output, "hash_ids": ids})
            for time_ms, tokens, output, ids in requests
        )
    )
    return read_trace(file)


def trace_work(trace: Trace, speed: float = 1.0, block_tokens: int = 512, most: int | None = None) -> TraceWork:
    return TraceWork(trace, {"file": "t", "requests": len(trace.requests)}, speed, block_tokens, most)


def test_equal_hashes_are_equal_tokens_and_lengths_are_those_of_the_trace(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t",
        [(2000, 1100, 30, [5, 6, 7]), (3000, 1030, 9, [5, 6, 8]), (2500, 512, 4, [9]), (3000, 700, 1, [5])],
    )
    work = trace_work(trace, speed=2.0)
    conversations = work.conversations(Seed(3, 1), None)
    assert [one.due_s for one in conversations] == [0.0, 0.5, 0.25, 0.5]
    assert [one.turns[0].output_tokens for one in conversations] == [30, 9, 4, 1]
    first, second, third, fourth = (prompt for (prompt,) in prompts(work, Seed(3, 1)))
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1100, 1030, 512, 700]
    assert in_common(first, second) == 1024
    # Behind the block that has a hash come tokens of the request's own.
    assert in_common(first, fourth) == 512
    assert in_common(first, third) == 0


def test_smaller_blocks_make_shorter_prompts_with_the_same_in_common(tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [(0, 1100, 30, [5, 6, 7]), (0, 1030, 9, [5, 6, 8]), (0, 1, 0, [5])])
    work = trace_work(trace, block_tokens=32, most=10)
    first, second, third = (prompt for (prompt,) in prompts(work, Seed(3, 1)))
    assert [len(prompt) for prompt in (first, second, third)] == [69, 64, 1]
    assert in_common(first, second) == 64
    assert [one.turns[0].output_tokens for one in work.conversations(Seed(3, 1), None)] == [10, 9, 1]


def test_a_request_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 requests of the trace have an input_length of 0"):
        trace_work(write(tmp_path / "t", [(0, 0, 1, []), (0, 5, 1, [1])]))


def test_what_a_workload_was_made_with_is_json() -> None:
    for workload in (MultiTurn(1, 2, 3, 4, 0.5), SharedPrefix(1, 2, 3, 4, 5)):
        parameters: dict[str, Any] = json.loads(json.dumps(workload.parameters()))
        assert parameters["kind"] == workload.kind
