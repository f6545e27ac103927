# SPDX-License-Identifier: Apache-2.0
"""The stream of an answer, however it is cut into pieces and whatever is in it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.serve import asking
from moonpool.bench.serve.asking import Answer, _GarbageError, _Reply


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def part(*ids: int, text: str = "", finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"text": text, "finish_reason": finish}
    return event({"choices": [choice | ({"token_ids": list(ids)} if ids else {})]})


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
STREAM = b"".join(
    [
        b": a comment\r\n\r\nevent: completion\nid: 3\n",
        part(7, text="a"),
        part(8, 9, text="bc"),
        part(),
        part(10, text="é", finish="length"),
        event({"choices": [], "usage": USAGE}),
        b"data: [DONE]\r\n\r\n",
    ]
)


def fed(pieces: list[bytes]) -> Answer:
    answer = Answer()
    reply = _Reply(answer, 0.0)
    for now, piece in enumerate(pieces, 1):
        reply.feed(piece, float(now))
    reply.close()
    return answer


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_it_does_not_matter_how_it_is_cut(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    answer = fed([STREAM[begin:end] for begin, end in itertools.pairwise(ends)])
    assert (answer.token_ids, answer.text, answer.tokens) == ([7, 8, 9, 10], "abcé", 4)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.failure) == (9, 8, "")
    assert answer.ttft is not None
    assert len(answer.gaps) == 2
    assert min(answer.gaps) >= 0
    assert answer.ttft + sum(answer.gaps) <= len(ends)


def test_times_are_those_at_which_tokens_came() -> None:
    answer = fed([part(), part(1), b": nothing\n", part(2), part(3, 4), b"data: [DONE]\n\n"])
    assert answer.ttft == 2.0
    assert answer.gaps.tolist() == [2.0, 1.0]
    assert answer.tokens == 4


def test_tokens_that_are_not_told_are_those_of_the_usage() -> None:
    text = [part(text="a"), part(text="b"), part(text="c", finish="stop")]
    done = b"data: [DONE]\n\n"
    assert fed([*text, done]).tokens == 3
    assert fed([*text, event({"choices": [], "usage": {"completion_tokens": 11}}), done]).tokens == 11


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_nonsense_is_garbage_or_no_whole_answer(first: bytes, second: bytes) -> None:
    for pieces in ([first, second], [part(1), first, second], [b"data: " + first + b"\n" + second]):
        answer = Answer()
        reply = _Reply(answer, 0.0)
        try:
            for piece in pieces:
                reply.feed(piece, 1.0)
        except _GarbageError as error:
            assert len(str(error)) < 2000  # noqa: PT017  # most nonsense is none that raises
        else:
            reply.close()
            assert answer.failure


@pytest.mark.parametrize(
    "line",
    [
        b"data: 5\n",
        b"data: []\n",
        b"data: {}\n",
        b'data: {"choices": 5}\n',
        b'data: {"choices": [5]}\n',
        b'data: {"choices": [{"text": 5}]}\n',
        b'data: {"choices": [{"token_ids": ["a"]}]}\n',
        b'data: {"choices": [{"token_ids": 5}]}\n',
        b'data: {"choices": [], "usage": 5}\n',
        b"data: " + b"[" * 100_000 + b"\n",
        b"what: is this\n",
        b"data: [DONE]\ndata: [DONE]\n",
    ],
)
def test_what_is_no_event_of_a_completion_is_garbage(line: bytes) -> None:
    with pytest.raises(_GarbageError):
        fed([line])


def test_a_line_without_an_end_is_garbage_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_LINE_BYTES_MAX", 1000)
    with pytest.raises(_GarbageError):
        fed([b"x" * 100] * 11)
