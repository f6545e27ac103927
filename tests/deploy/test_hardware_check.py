# SPDX-License-Identifier: Apache-2.0
"""The arguments of `deploy/hardware_check.sh`, and its ends. What it measures is tested in the emulated machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.address import parse_address
from moonpool.bench.backends import Place
from moonpool.bench.targets import RemoteTarget

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "hardware_check.sh"
BENCH = shlex.join([sys.executable, "-m", "moonpool.bench.cli"])
ENVIRON = {**os.environ, "MOONCAKE_BENCH": BENCH}
ENDS = ("--devices", "mlx5_0", "--target-devices", "mlx5_1")


def check(*arguments: str, folder: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder, env={**ENVIRON, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip


def test_help_teaches_every_option() -> None:
    done = check("--help")
    assert (done.returncode, done.stderr) == (0, "")
    options = set(re.findall(r"^ +(--[a-z-]+)\) ", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))
    assert options >= {"--devices", "--listen", "--secret", "--drill"}
    assert not {option for option in options if option not in done.stdout}
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert check("target", "--help").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["measure"], 'there is no "measure"'),
        (["local"], "local needs --devices and --target-devices"),
        (["local", *ENDS, "--fast"], "there is no option --fast"),
        (["local", *ENDS, "elsewhere"], 'what is "elsewhere"?'),
        (["local", *ENDS, "--drill", "often"], "--drill often: auto, link, manual or skip"),
        (["local", *ENDS, "--steps", "sweep,lunch"], '--steps "lunch": correctness, sweep or drill'),
        (["local", *ENDS, "--steps", ","], '--steps "": correctness, sweep or drill'),
        (["local", *ENDS, "--steps", "*"], '--steps "*": correctness, sweep or drill'),
        (["local", *ENDS, "--report", ".md"], "a name that ends in .md"),
        (["local", *ENDS, "--report", "report.txt"], "a name that ends in .md"),
        (["local", *ENDS, "--report", "nowhere/report.md"], "nowhere/report.md cannot be written"),
        (["local", *ENDS, "--secret", "x"], "--secret does not belong to local"),
        (["local", "--devices"], "--devices needs a value"),
        (["run"], "run needs the address of the target"),
        (["run", "there:7800", "--listen", "here:7800"], "--listen does not belong to run"),
        (["target"], "target needs --listen ADDR:PORT"),
        (["target", "--listen", "127.0.0.1:0", "--limit", "1h"], "--limit 1h is no number of seconds"),
        (["target", "--listen", "0.0.0.0:0"], "--secret with the same text on both hosts, or --insecure"),
    ],
)
def test_what_makes_no_sense_is_status_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = check(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_without_the_benchmark_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = check("local", *ENDS, folder=tmp_path, MOONCAKE_BENCH="mooncake-bunch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no mooncake-bunch. Try: pip install 'moonpool[bench]'" in done.stderr


def test_without_a_folder_for_its_figures_it_does_not_begin(tmp_path: Path) -> None:
    done = check("local", *ENDS, folder=tmp_path, TMPDIR="/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Try: TMPDIR=" in done.stderr
    assert "MOONCAKE_BENCH is blank" in check("local", *ENDS, folder=tmp_path, MOONCAKE_BENCH=" ").stderr


def test_figures_outlive_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    # Stands for every step, and for the target; the report finds its disk full.
    bench = tmp_path / "bench"
    bench.write_text(
        """#!/bin/sh
        case "$2" in
          serve) echo "listening on 127.0.0.1:1 for" >&2; exec sleep 60 ;;
          report) exit 3 ;;
        esac
        while [ "$1" != --folder ]; do shift; done
        echo "figures of it" >"$2/figures"
        """,
        encoding="ascii",
    )
    bench.chmod(0o755)
    (tmp_path / "work").mkdir()
    done = check(
        "local", *ENDS, "--report", "-t.md", "--drill", "skip",
        folder=tmp_path, MOONCAKE_BENCH=str(bench), TMPDIR=str(tmp_path / "work"),
    )  # fmt: skip
    assert done.returncode == 3
    (kept,) = (tmp_path / "work").glob("*/figures")
    assert kept.read_text() == "figures of it\n"
    assert f"The figures are in {kept.parent}" in done.stderr
    assert f"--folder {kept.parent}" in done.stderr
    assert not (tmp_path / "-t.md").exists()


def test_a_host_without_such_a_device_cannot_begin(tmp_path: Path) -> None:
    done = check("local", "--devices", "no_such_0", "--target-devices", "no_such_1", folder=tmp_path)
    assert done.returncode == 3
    assert "rdma" in done.stderr
    assert "hardware_check: it could not begin" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_no_address_is_status_2(tmp_path: Path) -> None:
    done = check("run", "there", folder=tmp_path)
    assert done.returncode == 2
    assert "'there'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@contextmanager
def target(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A target that listens, and its address."""
    with subprocess.Popen(
        ["bash", str(SCRIPT), "target", "--listen", "127.0.0.1:0", *options], env=ENVIRON, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            match = re.search(r"listening on (\S+) for run after run", process.stderr.readline())
            assert match is not None
            yield process, match[1]
        finally:
            process.terminate()
            process.wait(60)


def test_a_target_serves_run_after_run_until_it_is_told_that_it_was_the_last() -> None:
    with target("--secret", "s3cret") as (process, address):
        where = parse_address(address)
        place = Place(where.host, b"s3cret")
        broken = RemoteTarget(where, place)
        broken.close()
        for dismissed in (False, True):
            remote = RemoteTarget(where, place)
            assert remote.call("describe")["moonpool"]
            if dismissed:
                remote.call("dismiss")
            remote.goodbye()
            remote.close()
        assert process.wait(60) == 0


def test_a_target_that_nobody_dismisses_ends_by_itself() -> None:
    with target("--limit", "10") as (process, _):
        assert process.wait(60) == 3
        assert process.stderr is not None
        assert "nobody was done within 10 s" in process.stderr.read()


def test_ctrl_c_ends_a_target_and_what_it_started() -> None:
    with target() as (process, address):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        # The pipe ends when the last process that has it is gone.
        assert process.stderr is not None
        process.stderr.read()
        with pytest.raises(Exception, match="cannot connect"):
            RemoteTarget(parse_address(address), Place())
