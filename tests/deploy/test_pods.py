# SPDX-License-Identifier: Apache-2.0
"""What the pods of deploy/kubernetes run, run here: commands, probes, and what comes before a stop."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
WAIT_S = 60.0


def container(file: str, kind: str) -> dict[str, Any]:
    for one in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8")):
        if one["kind"] == kind:
            found: dict[str, Any] = one["spec"]["template"]["spec"]["containers"][0]
            return found
    raise LookupError(kind)


class Pod:
    """A container's command in folders of this test, with ports, sizes and store of this machine."""

    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self.folder = folder
        for name in ("config", "secret", "run"):
            (folder / name).mkdir()
        (folder / "secret" / "secret").write_text("s3cret\n", encoding="ascii")
        self.environ = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def say(self, text: str) -> str:
        return text.replace("/etc/moonpool", str(self.folder)).replace("/run/moonpool", str(self.folder / "run"))

    def config(self, name: str, **changes: str) -> None:
        lines = self.say((FOLDER / name).read_text(encoding="utf-8")).splitlines()
        changed = [
            f'{key} = "{changes[key]}"' if (key := line.partition(" = ")[0]) in changes else line for line in lines
        ]
        (self.folder / "config" / name).write_text("\n".join(changed), encoding="utf-8")

    @contextmanager
    def start(self, words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen([self.say(word) for word in words], env=self.environ, text=True, **options) as process:
            try:
                yield process
            finally:
                process.kill()

    def ask(self, probe: dict[str, Any]) -> int:
        words = [self.say(word) for word in probe["exec"]["command"]]
        return subprocess.run(words, env=self.environ, capture_output=True, check=False).returncode


@pytest.fixture
def pod(tmp_path: Path, bin_folder: Path) -> Pod:
    return Pod(tmp_path, bin_folder)


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_master_and_a_node_start_are_asked_drain_and_stop(pod: Pod, started: ExitStack) -> None:
    master = container("masters.yaml", "StatefulSet")
    pod.config("master.toml", listen="127.0.0.1:0", http="127.0.0.1:0", store="memory")
    first = started.enter_context(pod.start(["moonpool", *master["args"]], stdout=subprocess.PIPE))
    assert first.stdout is not None
    # moonpool master: serving on HOST:PORT, status on http://HOST:PORT/status
    said = first.stdout.readline().split()
    address, pages = said[4].rstrip(","), said[-1].removesuffix("/status")
    for name in ("readinessProbe", "livenessProbe"):
        with urllib.request.urlopen(pages + master[name]["httpGet"]["path"], timeout=WAIT_S) as answer:
            assert answer.status == 200

    node = container("nodes.yaml", "DaemonSet")
    pod.config("node.toml", master=address, dram="4MiB", listen="127.0.0.1:0")
    pod.environ["MOONPOOL_NODE_NAME"] = "gpu-7"
    assert pod.ask(node["readinessProbe"]) != 0
    second = started.enter_context(pod.start(node["command"], stdout=subprocess.DEVNULL))
    wait_for(lambda: pod.ask(node["readinessProbe"]) == 0 or second.poll() is not None)
    assert second.poll() is None

    before_stop = [pod.say(word) for word in node["lifecycle"]["preStop"]["exec"]["command"]]
    drained = subprocess.run(before_stop, env=pod.environ, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert drained.returncode == 0, drained.stderr
    assert "its node can be stopped" in drained.stdout
    # The shell has made way: the signal reaches the node.
    for process in (second, first):
        process.terminate()
        assert process.wait(WAIT_S) == 0
