# SPDX-License-Identifier: Apache-2.0
"""deploy/Dockerfile: its steps have what they read, and its last stage is what people will run."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def sent_to_the_builder() -> list[str]:
    """Return the files that .dockerignore lets through, as builders read it: the last line that fits decides."""
    rules = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
    ]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip

    def goes(path: str) -> bool:
        above = [path, *(str(folder) for folder in Path(path).parents if folder != Path())]
        out = False
        for rule in rules:
            pattern = rule.removeprefix("!").removeprefix("**/")
            names = [Path(name).name for name in above] if "**/" in rule else above
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                out = not rule.startswith("!")
        return not out

    return [path for path in listed if (ROOT / path).is_file() and goes(path)]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    for path in sent_to_the_builder():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    return folder


def test_what_is_sent_is_what_is_built(context: Path) -> None:
    assert sorted(path.name for path in context.iterdir()) == [
        "LICENSE", "README.md", "bench", "common", "cython_ext", "master", "node", "proto", "pyproject.toml",
        "store_client", "tools", "transfer_engine",
    ]  # fmt: skip
    assert [path.name for path in (context / "tools").iterdir()] == ["setup-system.sh"]


def test_the_build_finds_its_metadata_and_its_sources(context: Path, tmp_path: Path) -> None:
    # What `pip wheel` asks the build system for before it compiles for minutes, then what it compiles.
    say = "import sys; from scikit_build_core import build; print(build.prepare_metadata_for_build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", say, str(tmp_path)], cwd=context, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "Name: moonpool\n" in metadata.read_text(encoding="utf-8")
    configured = subprocess.run(
        ["cmake", "-S", context / "cython_ext", "-B", tmp_path / "build", "-DMOONPOOL_PYTHON=OFF"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert configured.returncode == 0, configured.stderr


def test_what_is_copied_is_there(context: Path) -> None:
    for word, rest in instructions():
        assert word != "ADD"
        if word == "COPY":
            *sources, _ = (part for part in rest.split() if not part.startswith("--"))
            assert sources
            assert all((context / source).exists() for source in sources), rest


def test_the_command_is_process_1_and_nobody_special() -> None:
    last = dict(stages()[-1])
    assert json.loads(last["ENTRYPOINT"]) == ["moonpool"]
    assert json.loads(last["CMD"]) == ["--help"]
    assert [int(number) > 999 for number in last["USER"].split(":")] == [True, True]
    scripts = re.search(r"\[project\.scripts\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL)
    assert scripts is not None
    assert "moonpool = " in scripts[1]


def test_the_extras_that_it_installs_are_extras() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.DOTALL | re.MULTILINE)
    there = set(re.findall(r"^([\w-]+) = \[", extras, re.MULTILINE))
    named = {one for _, rest in instructions() for one in re.findall(r"(?:\.|moonpool)\[(\w+)\]", rest)}
    assert named == {"etcd"} <= there


def test_both_stages_are_of_one_python_that_moonpool_runs_on() -> None:
    bases = {rest.partition(" AS ")[0] for word, rest in instructions() if word == "FROM"}
    assert len(bases) == 1
    arguments = dict(rest.split("=") for word, rest in instructions() if word == "ARG")
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert least is not None
    assert int(arguments["PYTHON"].removeprefix("3.")) >= int(least[1])


def test_hadolint_has_nothing_to_say() -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed")
    # Versions of Debian's packages are those of the base image.
    done = subprocess.run([linter, "--ignore", "DL3008", FILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
