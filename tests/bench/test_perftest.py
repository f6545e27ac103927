# SPDX-License-Identifier: Apache-2.0
"""perftest as the limit of RDMA: which program, with what, and what its report says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonpool.bench.backends import Place, RowSide
from moonpool.bench.backends import perftest as measured
from moonpool.bench.backends.perftest import Perftest, command_of, tool_of, window_of
from moonpool.bench.errors import AGAIN, NO_LIMIT, BenchError
from moonpool.bench.rails import Rail
from moonpool.bench.work import Layout, Work

RAIL = Rail("mlx5_0", 2, True, "10.0.0.7", 3, "index 3, 10.0.0.7 (RoCE v2, IPv4), the only one")
BANDWIDTH = """
                    RDMA_Write BW Test
 Number of qps   : 1\t\tTransport type : IB
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:77:01:02
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    320              71.25              68.50\t\t   0.000069
---------------------------------------------------------------------------------------
"""
LATENCY = """
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 4096    1000          10.71        119.69      12.89 \t       13.50            0.93         21.10                119.69
"""  # noqa: E501 - as it is


def work(op: str = "write", block: int = 1 << 20, batch: int = 16, threads: int = 1) -> Work:
    return Work("rdma", op, block, batch, "sequential", threads, None, block * batch * threads)


def row(work: Work) -> RowSide:
    layouts = Layout(work, target=False), Layout(work, target=True)
    return RowSide(work, *layouts, np.zeros(work.footprint_bytes, np.uint8), "acked", 0)


@pytest.mark.parametrize(
    ("given", "tool"),
    [
        (work(), "ib_write_bw"),
        (work("read"), "ib_read_bw"),
        (work(block=4096, batch=1), "ib_write_lat"),
        (work("read", block=8, batch=1), "ib_read_lat"),
        (work(block=4096, batch=2), "ib_write_bw"),
        (work(block=4096, batch=1, threads=2), "ib_write_bw"),
        (work(block=65536, batch=1), "ib_write_bw"),
    ],
)
def test_single_small_blocks_are_a_matter_of_latency(given: Work, tool: str) -> None:
    assert tool_of(given) == tool


def test_the_same_size_and_depth() -> None:
    command = command_of(work(block=65536, batch=8, threads=2), RAIL, 7802, 500)
    assert " ".join(command) == "ib_write_bw -d mlx5_0 -i 2 -x 3 -s 65536 -n 500 -t 16 -p 7802 -F"
    assert "-t" not in command_of(work(block=64, batch=1), RAIL, 7802, 500)


def test_the_report_on_bandwidth() -> None:
    window = window_of(work(), BANDWIDTH)
    assert window.gbytes_per_s == pytest.approx(68.50 * (1 << 20) / 1e9)
    assert (window.payload_bytes, window.transfers, window.latency) == (320 << 20, 20, None)


def test_the_report_on_latency() -> None:
    window = window_of(work(block=4096, batch=1), LATENCY)
    assert window.latency is not None
    assert (window.latency.p50_us, window.latency.p99_us, window.latency.p999_us) == (12.89, 21.10, 119.69)
    assert window.seconds == pytest.approx(13.5e-3)


def test_a_report_without_a_rate_is_asked_for_again() -> None:
    with pytest.raises(BenchError, match="frequency") as error:
        window_of(work(), BANDWIDTH.replace("71.25", "0.00").replace("68.50", "0.00"))
    assert error.value.code == AGAIN


def test_a_report_of_endless_times_is_asked_for_again() -> None:
    with pytest.raises(BenchError, match="frequency") as error:
        window_of(work(block=4096, batch=1), re.sub(r"\d+\.\d+", "inf", LATENCY))
    assert error.value.code == AGAIN


def test_a_failure_shows_the_last_words() -> None:
    with pytest.raises(BenchError, match=r"Couldn't connect to there:7802.*--only engine"):
        window_of(work(), " Couldn't connect to there:7802\n Unable to init the socket connection\n")


def test_without_perftest_there_is_no_limit_and_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BenchError, match="ib_write_bw of perftest is not installed") as error:
        Perftest(Place()).target(row(work()))
    assert (error.value.code, error.value.hint) == (NO_LIMIT, "apt-get install perftest")


@pytest.fixture
def perftest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Perftest]:
    """Replace every program of perftest by a script, and the engine by two rails."""

    def made(script: str) -> Perftest:
        for name in ("ib_write_bw", "ib_write_lat"):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        rails = [Rail(f"mlx5_{n}", 1, n != 0, f"10.0.{n}.7", 3, "the port is down") for n in range(3)]
        monkeypatch.setattr(measured, "find_rails", lambda devices: rails)
        return Perftest(Place())

    return made


def test_the_other_end_is_the_one_that_is_nearest(perftest: Callable[[str], Perftest]) -> None:
    backend = perftest("exit 0")
    target = backend.target(row(work()))
    assert [rail["device"] for rail in target.offer["rails"]] == ["mlx5_1", "mlx5_2"], "one is down"
    offer = target.offer | {"rails": target.offer["rails"][::-1]}
    assert backend.initiator(row(work()), offer).order(1.0)["rail"] == 1


def test_as_many_iterations_as_fill_the_window(perftest: Callable[[str], Perftest]) -> None:
    backend = perftest(f"cat <<'END'{BANDWIDTH}END")
    side = backend.initiator(row(work()), backend.target(row(work())).offer)
    assert side.order(0.1)["iterations"] == 32
    window = side.run(0.1)
    assert window.gbytes_per_s == pytest.approx(0.0718, rel=1e-3)
    first = side.order(1.0)["iterations"]
    assert first % 16 == 0
    assert first == pytest.approx(32 / window.seconds, abs=16)


def test_a_target_that_does_not_come_up_is_told_with_its_reason(perftest: Callable[[str], Perftest]) -> None:
    target = perftest("echo No IB devices found; exit 1").target(row(work()))
    with pytest.raises(BenchError, match="No IB devices found"):
        target.arm({"rail": 0, "iterations": 16, "seconds": 0.1})
    target.close()


def test_a_program_that_hangs_is_ended(
    perftest: Callable[[str], Perftest], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(measured, "_START_S", 0.1)
    backend = perftest("exec sleep 60")
    side = backend.initiator(row(work()), backend.target(row(work())).offer)
    side.order(0.0)
    with pytest.raises(BenchError, match="did not end in time"):
        side.run(0.0)
    side.close()
