# SPDX-License-Identifier: Apache-2.0
"""The laboratory itself: what its tests report outside, and what happens when the machine fails."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_testing.leaks import eventually

from rdma_lab import image, machine
from rdma_lab.cpio import Archive
from rdma_lab.items import RUN_LIMIT
from rdma_lab.machine import Machine, MachineError

TESTS = Path(__file__).parents[1]

# The runner as a process of this host instead of a machine, with tests of a folder.
RUNNER = """
import sys
from pathlib import Path
from rdma_lab.inside import runner
sys.exit(runner.main(int(sys.argv[1]), Path.cwd() / "inside"))
"""
# The plugin of the pytest outside.
OUTSIDE = f"""
import sys
from pathlib import Path
from rdma_lab.items import Lab, Plugin
from rdma_lab.machine import Machine

def start():
    print("started")
    return Machine(lambda fd: [sys.executable, "-c", {RUNNER!r}, str(fd)], limit=60.0)

def pytest_configure(config):
    config.pluginmanager.register(Plugin(Lab(start, lambda: None, slack=1.0), Path.cwd() / "inside"))
"""
INSIDE = """
import ctypes
import signal
import pytest

@pytest.fixture
def broken():
    raise LookupError("no such thing")

@pytest.fixture
def leaving():
    yield
    raise LookupError("left badly")

@pytest.mark.parametrize("word", ["one", "two"])
def test_words(word):
    assert word == "one", "not that word"

def test_prints():
    print("what it printed")
    assert False

def test_skips():
    pytest.skip("for want of a moon")

@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail():
    assert False

def test_has_a_broken_fixture(broken):
    pass

def test_leaves_badly(leaving):
    pass

def test_ends_the_machine():
    ctypes.string_at(0)

@pytest.mark.timeout(3)
def test_is_stuck_in_native_code():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(100)

def test_is_good():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "test_inside.py").write_text(INSIDE, encoding="utf-8")
    (tmp_path / "outside.py").write_text(OUTSIDE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return tmp_path


def run_pytest(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return done.stdout + done.stderr


def run_both(folder: Path, *options: str) -> str:
    return run_pytest(folder, "-p", "outside", "-rA", *options)


def outcomes(output: str) -> dict[str, str]:
    return {name: word for word, name in re.findall(r"^([A-Z]+) \S+::(\S+)", output, re.MULTILINE)}


def test_tests_inside_are_reported_outside_as_if_they_had_run_here(folder: Path) -> None:
    output = run_both(folder)
    assert outcomes(output) == {
        "test_words[one]": "PASSED",
        "test_words[two]": "FAILED",
        "test_prints": "FAILED",
        "test_is_expected_to_fail": "XFAIL",
        "test_has_a_broken_fixture": "ERROR",
        "test_leaves_badly": "ERROR",
        "test_ends_the_machine": "FAILED",
        "test_is_stuck_in_native_code": "FAILED",
        "test_is_good": "PASSED",
    }
    assert "AssertionError: not that word" in output
    assert "what it printed" in output
    assert re.search(r"SKIPPED \[1\] inside/test_inside\.py:\d+: for want of a moon", output)
    assert "LookupError: no such thing" in output
    assert "LookupError: left badly" in output
    # A machine that is lost is replaced by another one, and its last words are shown.
    assert re.search(
        r"ended with status -11\. Its console showed last:\n.*Fatal Python error: Segmentation fault", output
    )
    assert re.search(r"ended with status 1\. Its console showed last:\nTimeout(.*\n)*.*in test_is_stuck_in", output)


def test_a_part_of_the_tests_can_be_chosen(folder: Path) -> None:
    assert outcomes(run_both(folder, "-k", "words and two or is_good")) == {
        "test_words[two]": "FAILED",
        "test_is_good": "PASSED",
    }
    assert outcomes(run_both(folder, "inside/test_inside.py::test_words[one]")) == {"test_words[one]": "PASSED"}
    assert outcomes(run_both(folder, "-x", "-k", "words or prints")) == {
        "test_words[one]": "PASSED",
        "test_words[two]": "FAILED",
    }


def test_a_file_that_cannot_be_imported_inside_says_so_outside(folder: Path) -> None:
    test = 'import sys\nassert "pytest_timeout" not in sys.modules, "only outside"\ndef test_it(): pass\n'
    (folder / "inside" / "test_broken.py").write_text(test, encoding="utf-8")
    output = run_both(folder, "-k", "test_it or is_good")
    assert outcomes(output) == {"test_it": "ERROR", "test_is_good": "PASSED"}
    assert "there is no inside/test_broken.py::test_it" in output
    assert "AssertionError: only outside" in output


def test_the_tests_inside_are_collected_without_a_machine() -> None:
    output = run_pytest(TESTS.parent, "-p", "pytest_timeout", "--collect-only", "-q", "tests/rdma_lab/inside")
    assert "tests/rdma_lab/inside/test_verbs.py::test_a_pair_writes_and_reads" in output
    assert "tests/rdma_lab/inside/test_ports.py::test_a_device_is_active_with_the_largest_mtu[rxeb1]" in output


def test_what_the_machine_needs_is_installed_by_the_setup() -> None:
    setup = (TESTS.parent / "tools" / "setup-system.sh").read_text(encoding="utf-8")
    # These three are there on every Debian; Python comes with its package of pyverbs.
    for package in image.packages() - {"apt", "dpkg", "util-linux", "python3.11"}:
        assert f"need {package} " in setup


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.version_info[:2] != (3, 11) or platform.freedesktop_os_release().get("ID") != "debian",
    reason="only root on Debian, with its version of Python, has everything in any case",
)
def test_the_machine_can_be_made_here() -> None:
    assert image.missing() is None


@pytest.fixture
def dull() -> Iterator[tuple[Path, str, int]]:
    """A kernel, and a file system with an init that does nothing: its path and its descriptor."""
    if reason := image.missing():
        pytest.skip(reason)
    kernel, _ = image.prepare()
    with tempfile.TemporaryFile() as stream:
        archive = Archive(stream)
        archive.file("/bin/busybox", Path(shutil.which("busybox") or "busybox").resolve())
        archive.link("/bin/sh", "busybox")
        archive.text("/lab/init", "#!/bin/sh\necho 'init is here'\n/bin/busybox sleep 1000\n", 0o755)
        archive.close()
        stream.flush()
        yield kernel.binary, f"/proc/self/fd/{stream.fileno()}", stream.fileno()


@pytest.mark.timeout(RUN_LIMIT)
def test_a_machine_that_does_not_come_up_fails_within_its_limit(dull: tuple[Path, str, int]) -> None:
    kernel, initrd, held = dull
    command = machine.qemu(kernel, initrd, memory=256)
    with Machine(lambda fd: [*command, *machine.devices(fd)], limit=200.0, hold=[held]) as hanging:

        def failure() -> str:
            start = time.monotonic()
            with pytest.raises(MachineError, match=r"has not answered within 2 s\.") as raised:
                hanging.receive(2.0)
            assert 2.0 <= time.monotonic() - start < 60.0
            return str(raised.value)

        # How far it gets in two seconds is another matter on every host.
        assert eventually(lambda: "init is here" in failure(), 150.0)


@pytest.mark.timeout(RUN_LIMIT)
def test_a_machine_that_panics_fails_at_once(dull: tuple[Path, str, int]) -> None:
    kernel, initrd, held = dull
    command = machine.qemu(kernel, initrd, "rdinit=/nothing", memory=256)
    with (
        Machine(lambda fd: [*command, *machine.devices(fd)], limit=280.0, hold=[held]) as panicking,
        pytest.raises(MachineError) as failure,
    ):
        panicking.receive(280.0)
    assert "ended with status 0" in str(failure.value)
    assert "Kernel panic" in str(failure.value)


def is_alive(process: Path) -> bool:
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # dead, but its new parent has not looked yet


OWNER = """
import sys, time
from rdma_lab import machine
options = machine.qemu({kernel!r}, {initrd!r}, memory=256)
owned = machine.Machine(lambda fd: [*options, *machine.devices(fd)], limit=100.0, hold=[{held}])
print(owned.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.timeout(RUN_LIMIT)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_machine_ends_with_the_process_that_started_it(dull: tuple[Path, str, int], end: signal.Signals) -> None:
    kernel, initrd, held = dull
    program = textwrap.dedent(OWNER).format(kernel=str(kernel), initrd=initrd, held=held)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[held],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    ) as owner:
        assert owner.stdout is not None
        process = Path("/proc") / owner.stdout.readline().strip()
        assert is_alive(process)
        owner.send_signal(end)
        owner.wait(30)
    assert eventually(lambda: not is_alive(process))
