# SPDX-License-Identifier: Apache-2.0
"""``mooncake-bench serve`` against servers that stream, refuse, fail, hang and talk nonsense."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_testing import Terminal
from bench_testing.llm_server import Behaviour, LlmServer, answer_to
from click.testing import CliRunner, Result

from moonpool.bench import commands
from moonpool.bench.errors import ExitStatus
from moonpool.bench.serve import report, rounds

Bench = Callable[..., subprocess.CompletedProcess[str]]

KEYS = {
    "schema",
    "environment",
    "workload",
    "seed",
    "interrupted",
    "reference",
    "variants",
}
VARIANT_KEYS = {
    "name",
    "model",
    "rounds",
    "requests",
    "failed",
    "dropped",
    "failures",
    "gone",
    "stand_ins",
    "seconds",
    "requests_per_s",
    "output_tokens_per_s",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "queried_tokens",
    "hit_tokens",
    "hit_ratios",
    "ttft_ms",
    "later_ttft_ms",
    "itl_ms",
    "tpot_ms",
    "e2e_ms",
    "late_ms",
    "gains",
    "turns",
    "counters",
    "by_round",
}
TURN_KEYS = {"turn", "requests", "ttft_ms", "prompt_tokens", "cached_tokens", "gain"}
ROUND_KEYS = {"round", "planned", "requests", "failed", "dropped", "seconds", "output_tokens", "counted"}

#: 3 rounds of 4 users with 3 turns.
SMALL = [
    *("--users", "4", "--turns", "3", "--turn-tokens", "20", "--output-tokens", "5"),
    *("--warmup", "0", "--seed", "7"),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands.cli, ["serve", *arguments])


def measured(*arguments: str, status: ExitStatus = ExitStatus.OK) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == status, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_every_request_and_token_is_accounted_for(tmp_path: Path) -> None:
    with LlmServer() as fast, LlmServer(lambda number, body: Behaviour(first_s=0.05)) as slow:
        arguments = ["multi-turn", "--url", f"pool={fast.url}", "--url", f"none={slow.url}/v1", *SMALL]
        document = measured(*arguments, "--plot", str(tmp_path / "ttft.png"))
    assert set(document) == KEYS
    assert (document["schema"], document["seed"], document["reference"]) == (1, 7, "pool")
    assert document["environment"]["servers"]["models"] == {"pool": "stand-in", "none": "stand-in"}
    ours, theirs = document["variants"]
    for server, part in ((fast, ours), (slow, theirs)):
        assert set(part) == VARIANT_KEYS
        assert (part["rounds"], part["requests"], part["failed"], part["dropped"]) == (3, 36, 0, 0)
        assert len(server.asked) == 36
        assert part["output_tokens"] == 36 * 5
        assert part["prompt_tokens"] == sum(len(body["prompt"]) for body in server.asked) == part["queried_tokens"]
        assert part["cached_tokens"] == server.hits == part["hit_tokens"]["device"]
        assert part["hit_ratios"]["device"] == pytest.approx(server.hits / server.queried, rel=1e-5)
        assert part["counters"]["moonpool_connector_loads"] == 36
        assert [set(turn) for turn in part["turns"]] == [TURN_KEYS] * 3
        assert [turn["requests"] for turn in part["turns"]] == [12, 12, 12]
        assert [turn["prompt_tokens"] for turn in part["turns"]] == [20, 45, 70]
        # What was said in the turn before; its answer was told, and not asked.
        assert part["turns"][2]["cached_tokens"] >= 45
        assert [set(one) for one in part["by_round"]] == [ROUND_KEYS] * 3
        assert part["stand_ins"] == 0
        for times in ("ttft_ms", "later_ttft_ms", "e2e_ms", "itl_ms", "tpot_ms", "late_ms"):
            assert 0 <= part[times]["p50"] <= part[times]["p90"] <= part[times]["p99"] <= part[times]["max"]
    assert theirs["ttft_ms"]["p50"] >= 50
    assert ours["gains"] == {}
    assert set(theirs["gains"]) >= {"ttft_p50", "ttft_p99", "later_ttft_p50", "e2e_p50", "output_tokens_per_s"}
    assert theirs["gains"]["ttft_p50"]["low"] <= theirs["gains"]["ttft_p50"]["value"]
    assert theirs["turns"][1]["gain"] is not None
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_all_servers_are_asked_the_same_and_each_round_something_else() -> None:
    with LlmServer() as one, LlmServer() as other:
        measured("multi-turn", "--url", f"a={one.url}", "--url", f"b={other.url}", *SMALL, "--concurrency", "1")
        ours, theirs = ([body["prompt"] for body in server.asked] for server in (one, other))
        assert ours == theirs
        begins = [tuple(prompt) for prompt in ours if len(prompt) == 20]
        assert len(set(begins)) == len(begins) == 12
        measured("multi-turn", "--url", f"a={one.url}", *SMALL, "--same-prompts")
    again = [tuple(body["prompt"]) for body in one.asked[36:]]
    assert Counter(prompt for prompt in again if len(prompt) == 20) == Counter(dict.fromkeys(begins[:4], 3))


def test_a_prompt_goes_on_from_the_answer_of_the_server() -> None:
    with LlmServer() as server:
        measured("multi-turn", "--url", server.url, *SMALL, "--users", "1", "--rounds", "1")
    first, second, third = (body["prompt"] for body in server.asked)
    assert second[:25] == first + answer_to(first, 5)
    assert third[:50] == second + answer_to(second, 5)
    assert server.asked[0] == {
        "model": "stand-in",
        "prompt": first,
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


def test_a_server_that_tells_no_tokens_is_asked_with_stand_ins_or_text() -> None:
    with LlmServer(tokens=False) as server:
        document = measured("multi-turn", "--url", server.url, *SMALL)
        assert document["variants"][0]["stand_ins"] == 24
        assert "others stand in for 24 answers" in run("multi-turn", "--url", server.url, *SMALL).output
    with LlmServer(tokens=False) as server:
        document = measured("multi-turn", "--url", server.url, *SMALL, "--prompts", "text", "--plain")
    assert document["variants"][0]["stand_ins"] == 0
    assert document["variants"][0]["output_tokens"] == 36 * 5
    assert not {"ignore_eos", "return_token_ids"} & set(server.asked[0])
    first = server.asked[0]["prompt"]
    assert len(first.split()) == 20
    answer = "".join(f" t{token}" for token in answer_to(first, 5))
    assert any(body["prompt"].startswith(f"{first}{answer} ") for body in server.asked)


@pytest.mark.parametrize(
    ("behaviour", "failure", "detail"),
    [
        (Behaviour("status", 429), "refused", "status 429: no room"),
        (Behaviour("status", 503), "refused", "status 503: no room"),
        (Behaviour("status", 400), "http_400", "status 400: no"),
        (Behaviour("status", 500), "http_500", "status 500: no"),
        (Behaviour("cut"), "cut", "."),
        (Behaviour("reset"), "cut", "."),
        (Behaviour("no_done"), "cut", r"after 5 tokens, without \[DONE\]"),
        (Behaviour("garbage"), "garbage", r"not an event of a completion: \{nonsense"),
        (Behaviour("garbage_http"), "garbage", "."),
        (Behaviour("error"), "server", "the engine died"),
        (Behaviour("aborted"), "server", "finish_reason abort"),
        (Behaviour("empty"), "empty", "no tokens"),
        (Behaviour("hang"), "deadline", "no whole answer after 2 s"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Behaviour) else "",
)
def test_what_fails_is_counted_by_its_kind_and_shown(behaviour: Behaviour, failure: str, detail: str) -> None:
    # More than any other request takes, however busy the machine is; and only where it is waited for.
    deadline = ["--timeout", "2s"] if behaviour.kind == "hang" else []

    # Of the first round, the second turn of one user fails.
    def behave(number: int, body: dict[str, Any]) -> Behaviour:
        return behaviour if number == 5 else Behaviour()

    with LlmServer(behave) as server:
        result = run("multi-turn", "--url", server.url, *SMALL, *deadline, "--json", "-")
    assert result.exit_code == ExitStatus.FAILED, result.output
    (part,) = json.loads(result.stdout)["variants"]
    assert part["failures"] == {failure: 1}
    # Its third turn has nothing to go on from.
    assert (part["requests"], part["failed"], part["dropped"]) == (34, 1, 1)
    assert [one["planned"] for one in part["by_round"]] == [12, 12, 12]
    assert [one["dropped"] for one in part["by_round"]] == [1, 0, 0]
    assert part["gone"] is None
    said = " ".join(result.stderr.split())
    assert re.search(f"failed: .*: {failure}: 1 times; first: .*{detail}", said), said
    assert "1 requests, because what they follow failed" in said


def test_a_mixture_of_faults_is_accounted_for_to_the_last_request() -> None:
    kinds = ["ok", "cut", "garbage", "reset", "error", "empty", "no_done", "ok", "ok"]

    def behave(number: int, body: dict[str, Any]) -> Behaviour:
        # Of the prompt, so that it does not depend on who comes first.
        seed = sum(body["prompt"])
        return Behaviour(kinds[seed % len(kinds)], first_s=seed % 7 / 1000, each_s=seed % 3 / 1000)

    with LlmServer(behave) as server:
        document = measured(
            *(
                "shared-prefix",
                "--url",
                server.url,
                "--requests",
                "60",
                "--prefix-tokens",
                "30",
                "--suffix-tokens",
                "9",
            ),
            *("--output-tokens", "4", "--warmup", "0", "--concurrency", "7", "--seed", "3"),
            status=ExitStatus.FAILED,
        )
    (part,) = document["variants"]
    names = {"cut": "cut", "reset": "cut", "no_done": "cut", "error": "server", "garbage": "garbage", "empty": "empty"}
    expected = Counter(names.get(behave(0, body).kind, "ok") for body in server.asked)
    assert expected.total() == 180
    assert part["requests"] == expected.pop("ok")
    assert part["failures"] == dict(expected)
    assert part["dropped"] == 0
    assert server.under_way_most == 7


def test_a_server_that_is_away_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = run("multi-turn", "--url", f"http://127.0.0.1:{port}", *SMALL)
    assert result.exit_code == ExitStatus.FAILED
    assert f"http://127.0.0.1:{port}/v1/models: the server does not answer" in result.stderr.replace("\n", "")
    assert result.stdout == ""


def test_what_is_no_such_server_is_said_at_once() -> None:
    with LlmServer() as server:
        result = run("multi-turn", "--url", f"{server.url}/elsewhere", *SMALL)
    assert result.exit_code == ExitStatus.FAILED
    assert "not the answer of an OpenAI-compatible server" in result.stderr
    assert server.asked == []


def test_a_server_of_which_nothing_comes_is_left_out_and_the_others_go_on() -> None:
    bad = LlmServer(lambda number, body: Behaviour("status", 500))
    with LlmServer() as good, bad:
        document = measured(
            *("multi-turn", "--url", f"good={good.url}", "--url", f"bad={bad.url}", *SMALL), status=ExitStatus.FAILED
        )
    ours, theirs = document["variants"]
    assert (ours["requests"], ours["gone"]) == (36, None)
    assert (theirs["requests"], theirs["failed"], theirs["dropped"], theirs["rounds"]) == (0, 4, 8, 1)
    assert theirs["gone"] == "nothing came of any request: http_500: status 500: no"
    assert theirs["gains"] == {}
    assert theirs["ttft_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    assert len(bad.asked) == 4


def test_the_first_server_may_be_the_one_that_is_left_out() -> None:
    with LlmServer(lambda number, body: Behaviour("status", 404)) as bad, LlmServer() as good:
        result = run("multi-turn", "--url", f"bad={bad.url}", "--url", f"good={good.url}", *SMALL, "--warmup", "1")
    assert result.exit_code == ExitStatus.FAILED
    assert "given up: bad: nothing came of any request: http_404" in result.stdout
    assert re.search(r"^bad +0 +0 +–", result.stdout, re.MULTILINE)
    assert re.search(r"^good +36 +0 ", result.stdout, re.MULTILINE)
    assert "times better" not in result.stdout


def test_a_server_that_dies_is_left_out_with_what_it_did_until_then() -> None:
    dying = LlmServer(lambda number, body: Behaviour("die") if number == 17 else Behaviour())
    with LlmServer() as good, dying:
        document = measured(
            *("multi-turn", "--url", f"good={good.url}", "--url", f"dying={dying.url}", *SMALL, "--concurrency", "1"),
            status=ExitStatus.FAILED,
        )
    ours, theirs = document["variants"]
    assert (ours["requests"], ours["gone"]) == (36, None)
    # All of the first round; of the second one the first turns of all four, and the second of one.
    assert [one["requests"] for one in theirs["by_round"]] == [12, 5, 0]
    # It dies at the second of the second one; then come two more, the third turn of the first, and the next round.
    assert theirs["failures"] == {"cut": 1, "away": 3 + 4}
    assert theirs["requests"] + theirs["failed"] + theirs["dropped"] == 36
    assert theirs["gone"].startswith("nothing came of any request: away: ")
    # Its counters went with it.
    assert [one["counted"] for one in theirs["by_round"]] == [True, False, False]
    assert theirs["gains"]["ttft_p50"] is not None


def test_where_no_server_is_left_it_ends() -> None:
    with LlmServer(lambda number, body: Behaviour("status", 500)) as bad:
        result = run("multi-turn", "--url", f"bad={bad.url}", *SMALL, "--warmup", "1")
    assert result.exit_code == ExitStatus.FAILED
    assert "no server is left: bad: nothing came of any request: http_500" in result.stderr
    assert len(bad.asked) == 1


def test_a_server_that_hangs_is_given_up_before_all_requests_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_GONE_SECONDS", 0.5)
    hung = LlmServer(lambda number, body: Behaviour("hang") if number >= 5 else Behaviour())
    with hung:
        result = run(
            *(
                "shared-prefix",
                "--url",
                f"hung={hung.url}",
                "--requests",
                "500",
                "--timeout",
                "1s",
                "--concurrency",
                "2",
            ),
            *("--prefix-tokens", "5", "--suffix-tokens", "5", "--output-tokens", "3", "--warmup", "0", "--json", "-"),
        )
    assert result.exit_code == ExitStatus.FAILED
    (part,) = json.loads(result.stdout)["variants"]
    assert part["requests"] == 5
    assert 3 <= part["failures"]["deadline"] < 495
    assert part["requests"] + part["failed"] + part["dropped"] == 500
    assert part["gone"].startswith("nothing came of its last")


def test_requests_come_at_their_times_and_lateness_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--requests", "40", "--rate", "100", "--rounds", "1", "--warmup", "0", "--output-tokens", "2"]
    with LlmServer(lambda number, body: Behaviour(first_s=0.3)) as server:
        document = measured("shared-prefix", "--url", server.url, *arguments)
        monkeypatch.setattr(report, "_LATE_S", 0.0)
        output = run("shared-prefix", "--url", server.url, *arguments).output
    assert "after their time: this host does not keep up" in output
    (part,) = document["variants"]
    assert part["requests"] == 40
    # Nobody waits for the answers of others.
    assert server.under_way_most > 10
    assert part["late_ms"]["max"] >= part["late_ms"]["p50"] > 0


def test_a_trace_is_asked_in_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "\n".join(
            json.dumps(
                {"timestamp": 600 * number, "input_length": 1024, "output_length": 3, "hash_ids": [1, number + 2]}
            )
            for number in range(3)
        )
    )
    with LlmServer() as server:
        arguments = ["trace", str(file), "--url", server.url, "--speed", "2", "--rounds", "1", "--warmup", "0"]
        document = measured(*arguments, "--block-tokens", "16")
        assert "trace.jsonl · 3 requests" in " ".join(run(*arguments, "--requests", "3").stdout.split())
    prompts = [body["prompt"] for body in server.asked[:3]]
    assert [len(prompt) for prompt in prompts] == [32] * 3
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert document["variants"][0]["seconds"] >= 0.6
    assert document["workload"]["trace"] == {"file": "trace.jsonl", "requests": 3, "distinct": 4}


def test_a_trace_that_cannot_be_read_is_status_3(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("{")
    result = run("trace", str(file), "--url", "http://127.0.0.1:1")
    assert result.exit_code == ExitStatus.FAILED
    assert "line 1: not JSON" in result.stderr


def test_a_server_without_metrics_has_no_hits_by_tier() -> None:
    with LlmServer(metrics=False) as server:
        document = measured("multi-turn", "--url", server.url, *SMALL, "--rounds", "1")
        output = run("multi-turn", "--url", server.url, *SMALL).output
    (part,) = document["variants"]
    assert (part["queried_tokens"], part["hit_tokens"], part["counters"]) == (None, {}, {})
    assert part["cached_tokens"] == 4 * (20 + 45)
    assert not part["by_round"][0]["counted"]
    assert "hits by tier are not known" in output


def test_the_vocabulary_of_the_server_is_used_unless_another_is_asked_for() -> None:
    with LlmServer(vocabulary=110) as server:
        measured("multi-turn", "--url", server.url, *SMALL, "--rounds", "1", "--users", "1", "--turns", "1")
        assert set(server.asked[0]["prompt"]) <= set(range(100, 110))
        measured("multi-turn", "--url", server.url, *SMALL, "--vocab", "103", "--turns", "1")
        assert set(server.asked[-1]["prompt"]) <= {100, 101, 102}
        result = run("multi-turn", "--url", server.url, *SMALL, "--vocab", "100")
    assert result.exit_code == ExitStatus.FAILED
    assert "101 are the least" in result.stderr


def test_keys_are_sent_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hush-hush\n")
    with LlmServer() as server:
        result = run(*("multi-turn", "--url", server.url, *SMALL, "--api-key", f"@{tmp_path / 'key'}", "--json", "-"))
    assert {headers["authorization"] for headers in server.headers} == {"Bearer hush-hush"}
    assert "hush-hush" not in result.output


def test_the_report_says_who_is_better_and_by_how_much() -> None:
    with LlmServer() as fast, LlmServer(lambda number, body: Behaviour(first_s=0.03)) as slow:
        result = run("multi-turn", "--url", f"pool={fast.url}", "--url", f"none={slow.url}", *SMALL)
    assert result.exit_code == ExitStatus.OK, result.output
    assert "multi-turn · users 4 · turns 3" in result.stdout
    assert "seed 7" in result.stdout
    assert re.search(r"^pool +36 +0 ", result.stdout, re.MULTILINE)
    assert re.search(
        r"pool against none, times better \(95 % interval\): TTFT p50 [\d.]+ \([\d.]+ to [\d.]+\)", result.stdout
    )
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 160


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "whom to ask? Try: --url http://host:8000"),
        (["--url", "ftp://host"], "not an address such as http://host:8000"),
        (["--url", "http://host:port"], "Port could not be cast"),
        (["--url", "http://me:hush@host"], "would be in every report"),
        (["--url", "http://a", "--users", "1000000", "--turns", "2"], "more than 1,000,000 requests"),
        (["--url", "http://a", "--url", "http://a"], "two are called a"),
        (["--url", "http://a", "--rate", "1", "--concurrency", "2"], "one of the two"),
        (["--url", "http://a", "--rate", "0"], "not a number above 0"),
        (["--url", "http://a", "--engine-args", "{}"], "--engine-args belongs to --engine"),
        (["--engine", "none"], "--engine needs --model"),
        (["--engine", "none", "--model", "m", "--prompts", "text"], "--prompts text goes with --url"),
        (["--engine", "none", "--model", "m", "--plain"], "--plain belongs to --url"),
        (["--engine", "a={", "--model", "m"], "is not JSON"),
        (["--engine", "a=[1]", "--model", "m"], "is not a JSON object"),
        (["--engine", "a=@nowhere.json", "--model", "m"], "No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    result = run("multi-turn", *arguments)
    assert result.exit_code == ExitStatus.USAGE
    assert said in " ".join(result.output.split())


def test_help_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert "serve" in CliRunner().invoke(commands.cli, ["--help"]).output
    output = run("--help").output
    assert all(name in output for name in ("multi-turn", "shared-prefix", "trace", "pip install 'moonpool[serve]'"))
    for command in ("multi-turn", "shared-prefix", "trace"):
        output = run(command, "--help").output
        assert "--url" in output
        assert ("--rate" in output) == (command != "trace")


def test_without_aiohttp_it_says_what_to_install(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(\"No module named 'aiohttp'\", name='aiohttp')")
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    result = bench("serve", "multi-turn", "--url", "http://127.0.0.1:1", environ=environ)
    assert result.returncode == ExitStatus.USAGE
    assert "pip install 'moonpool[serve]'" in " ".join(result.stderr.split())
    assert bench("--help", environ=environ).returncode == ExitStatus.OK


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_rounds_that_were_complete_are_shown_after_an_interruption(how: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    # 12 requests of a round; in the third one they never end.
    with LlmServer(lambda number, body: Behaviour("hang") if number >= 24 else Behaviour()) as server:
        terminal = Terminal("serve", "multi-turn", "--url", f"it={server.url}", *SMALL, "--json", str(file))
        terminal.wait_for("round 3 of 3")
        terminal.send(how)
        status, output = terminal.ended()
    assert status == ExitStatus.INTERRUPTED
    assert re.search(r"^it +24 +0 ", output, re.MULTILINE)
    document = json.loads(file.read_text())
    assert document["interrupted"]
    assert document["variants"][0]["rounds"] == 2
