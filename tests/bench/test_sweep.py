# SPDX-License-Identifier: Apache-2.0
"""From the command line to rows."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from moonpool.bench import commands, perform
from moonpool.bench.errors import ExitStatus, UsageError
from moonpool.bench.options import SECRET, SIZE, Choices, ListOf, count
from moonpool.bench.runner import Options
from moonpool.bench.sweep import FOOTPRINT_BYTES, QUICK_FOOTPRINT_BYTES, Sweep, quick
from moonpool.bench.work import Tuning, Work
from moonpool.transfer_engine import probe


def test_lists_are_swept_and_the_last_varies_fastest() -> None:
    works = Sweep(["tcp"], ["read", "write"], [4096, 65536], [1, 2], threads=[1, 2]).works()
    assert len(works) == 16
    assert [(work.op, work.threads, work.block_bytes, work.batch) for work in works[:5]] == [
        ("read", 1, 4096, 1),
        ("read", 1, 4096, 2),
        ("read", 1, 65536, 1),
        ("read", 1, 65536, 2),
        ("read", 2, 4096, 1),
    ]
    assert {work.footprint_bytes for work in works} == {FOOTPRINT_BYTES}


def test_the_footprint_grows_with_the_batch_unless_it_was_given() -> None:
    (work,) = Sweep(["tcp"], ["read"], [16 << 20], [128], threads=[2]).works()
    assert (work.footprint_bytes, work.batches) == (4 << 30, 1)
    with pytest.raises(UsageError, match=r"do not fit into a footprint of 1GiB.*--footprint 4GiB"):
        Sweep(["tcp"], ["read"], [16 << 20], [128], threads=[2], footprint_bytes=1 << 30).works()


def test_a_block_that_cannot_be_verified_is_refused() -> None:
    with pytest.raises(UsageError, match=r"8-byte words.*--block-size 96"):
        Sweep(["tcp"], block_bytes=[100]).works()


def test_the_quick_sweep_covers_what_it_says() -> None:
    works = quick(["tcp", "local"])
    assert {(work.transport, work.op) for work in works} == {
        (transport, op) for transport in ("tcp", "local") for op in ("read", "write")
    }
    assert (min(work.block_bytes for work in works), max(work.block_bytes for work in works)) == (4 << 10, 16 << 20)
    assert all(work.batch_bytes <= QUICK_FOOTPRINT_BYTES for work in works)
    assert {work.batch for work in works if work.block_bytes <= 1 << 20} == {1, 128}


def test_options_are_parsed_strictly() -> None:
    assert ListOf("size", SIZE).convert("4KiB, 1MiB", None, None) == [4096, 1 << 20]
    assert ListOf("n", count(64, auto=True)).convert("auto,4", None, None) == [None, 4]
    assert Choices("name", ["tcp", "local"]).convert("local,tcp", None, None) == ["local", "tcp"]
    for parameter, text, message in [
        (ListOf("size", SIZE), "4KB", "4KiB for 4 x 1024 bytes"),
        (ListOf("size", SIZE), "0", "moves nothing"),
        (ListOf("size", SIZE), "4KiB,", "is not a size"),
        (ListOf("n", count(64)), "65", "from 1 to 64"),
        (ListOf("n", count(64)), "auto", "from 1 to 64"),
        (Choices("name", ["tcp", "local"]), "tpc", "Try: tcp"),
        (SECRET, "", "empty"),
        (SECRET, "@/does/not/exist", "cannot read the secret"),
    ]:
        with pytest.raises(click.BadParameter) as error:
            parameter.convert(text, None, None)
        assert message in str(error.value)


def test_a_secret_can_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("open sesame\n", encoding="utf-8")
    assert SECRET.convert(f"@{tmp_path / 'secret'}", None, None) == b"open sesame"
    assert SECRET.convert("open sesame", None, None) == b"open sesame"


class Plan:
    """What a command line asks for, without doing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works: list[Work] = []
        self.options = Options()

        def note(works: list[Work], options: Options, **_: object) -> ExitStatus:
            self.works, self.options = works, options
            return ExitStatus.OK

        monkeypatch.setattr(commands, "perform", note)

    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(commands.cli, arguments)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(monkeypatch)


def test_no_arguments_are_the_quick_sweep_over_what_this_host_has(plan: Plan) -> None:
    assert plan.invoke().exit_code == 0
    there = {transport.name for transport in probe() if transport.available}
    assert plan.works == quick([name for name in ("tcp", "rdma", "shm", "local") if name in there])
    assert plan.options.budget is not None
    assert plan.options.budget < 45


def test_transfer_takes_every_option(plan: Plan) -> None:
    options = """
        --transport tcp --op write --block-size 4KiB,1MiB --batch 1,8 --order random --lanes auto,2 --threads 1,2
        --footprint 32MiB --duration 250ms --warmup 0.1 --rounds 7 --limit stream --only limit
        --memory allocated --limit-threads 3
    """
    result = plan.invoke("transfer", *options.split())
    assert result.exit_code == 0, result.output
    assert len(plan.works) == 16
    assert plan.works[0] == Work("tcp", "write", 4096, 1, "random", 1, None, 32 << 20, "allocated")
    assert plan.works[-1] == Work("tcp", "write", 1 << 20, 8, "random", 2, 2, 32 << 20, "allocated")
    assert plan.options == Options(7, 0.25, 0.1, "stream", "limit", copy_threads=3)


def test_settings_of_the_engines_are_swept(plan: Plan) -> None:
    options = """
        --transport rdma,tcp --devices mlx5_0,mlx5_1:2@3 --target-devices mlx5_2 --queue-pairs 1,auto --slice 256KiB
        --inline 0 --spin-us auto,50 --op read --batch 1 --lanes 2
    """
    result = plan.invoke("transfer", *options.split())
    assert result.exit_code == 0, result.output
    ends = ("mlx5_0,mlx5_1:2@3", "mlx5_2")
    assert [(work.transport, work.lanes, work.tuning) for work in plan.works] == [
        ("rdma", None, Tuning(*ends, 1, 256 << 10, 0, None)),
        ("rdma", None, Tuning(*ends, 1, 256 << 10, 0, 50)),
        ("rdma", None, Tuning(*ends, None, 256 << 10, 0, None)),
        ("rdma", None, Tuning(*ends, None, 256 << 10, 0, 50)),
        ("tcp", 2, Tuning(slice_bytes=256 << 10)),
        ("tcp", 2, Tuning(slice_bytes=256 << 10, spin_us=50)),
    ]


def test_another_host_is_reached_over_the_network_only(plan: Plan) -> None:
    assert plan.invoke("transfer", "--target", "there:7800", "--secret", "s").exit_code == 0
    assert {work.transport for work in plan.works} == {"tcp"}
    assert (str(plan.options.target), plan.options.secret) == ("there:7800", b"s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("transfer --transport tpc", "Try: tcp"),
        ("transfer --block-size 4kb", "unknown unit"),
        ("transfer --block-size 100", "8-byte words"),
        ("transfer --batch 0", "from 1 to"),
        ("transfer --footprint 1MiB --block-size 1MiB", "do not fit"),
        ("transfer --target nowhere", "names no port"),
        ("transfer --target there:1 --transport local", "stays on one host"),
        ("transfer --insecure", "belongs to --listen"),
        ("transfer --depth 0", "from 1 to"),
        ("transfer --transport tcp --depth 2", "add --limit stream"),
        ("transfer --footprint 16MiB --depth 2 --limit stream", "do not fit"),
        ("transfer --rounds 0", "1<=x<=1000"),
        ("transfer --transport tcp --devices mlx5_0", "--devices belongs to --transport rdma"),
        ("transfer --transport tcp --inline 64", "--inline belongs to --transport rdma"),
        ("transfer --transport rdma --queue-pairs 17", "from 1 to 16"),
        ("transfer --transport rdma --inline -1", "from 0 to 4096"),
        ("transfer --transport rdma --spin-us often", "from 0 to 10000"),
        ("transfer --slice 4KiB", "slice_bytes"),
        ("transfer --listen 127.0.0.1:0 --batch 1", "belongs to the side with --target"),
        ("transfer --listen 0.0.0.0:0", "can be reached from elsewhere"),
        ("transfer --limit none", "acked"),
        ("--json - transfer", "belong behind the command"),
        ("frobnicate", "No such command"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(plan: Plan, arguments: str, message: str) -> None:
    result = plan.invoke(*arguments.split())
    assert result.exit_code == ExitStatus.USAGE
    assert message in " ".join(result.output.split())
    assert plan.works == []


def test_help_teaches(plan: Plan) -> None:
    for arguments in (["--help"], ["transfer", "--help"], ["doctor", "-h"]):
        result = plan.invoke(*arguments)
        assert result.exit_code == 0
        assert "Examples:" in result.output


def test_the_header_names_what_all_rows_share() -> None:
    works = Sweep(["tcp"], ["read"], [4096], [1], lanes=[None], threads=[1, 2]).works()
    assert perform.fixed_parameters(works) == {
        "memory": "registered",
        "order": "sequential",
        "lanes": "auto",
        "footprint": "256MiB",
    }
