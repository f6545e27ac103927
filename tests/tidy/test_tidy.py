# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Component -> the components it may import. An arrow that is not here is a fault.
MAY_IMPORT = {
    # Late: local_cluster() starts processes, and hands out clients of them.
    "common/moonpool": {"store_client"},
    "proto": set(),
    # The index is all that the master has of the native side: it never touches the bytes of chunks.
    "master": {"moonpool", "proto", "_index"},
    "transfer_engine": {"moonpool", "_native"},
    "store_client": {"moonpool", "proto", "transfer_engine"},
    "node": {"moonpool", "proto", "store_client", "transfer_engine"},
    "connector": {"moonpool", "store_client", "transfer_engine"},
    "bench": {"moonpool", "proto", "store_client", "node", "transfer_engine", "_index", "_limits"},
}
# Modules of the base package, which everybody may import.
BASE = {"address", "cli", "cluster", "errors", "settings", "units"}
LINES_MAX = 600
SOURCE_SUFFIXES = {
    ".c",
    ".cmake",
    ".cpp",
    ".h",
    ".hpp",
    ".map",
    ".pxd",
    ".pxi",
    ".py",
    ".pyi",
    ".pyx",
    ".sh",
    ".toml",
    ".yaml",
}


@cache
def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def sources() -> list[Path]:
    named = {"CMakeLists.txt", "Makefile", "run", ".clang-format"}
    return [path for path in files() if path.suffix in SOURCE_SUFFIXES or path.name in named]


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a Python file imports, relative ones made absolute enough to be seen."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path}: import beyond the component by a relative path"
            if node.level == 0 and node.module == "moonpool":
                yield from (f"moonpool.{alias.name}" for alias in node.names)
            elif node.level == 0 and node.module is not None:
                yield node.module


@pytest.mark.parametrize("component", MAY_IMPORT)
def test_components_import_only_what_they_may(component: str) -> None:
    own = component.rpartition("/")[2]
    allowed = MAY_IMPORT[component] | {own} | BASE
    for path in (ROOT / component).rglob("*.py"):
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "moonpool" or len(parts) == 1 or not (parts[1].islower() or parts[1].startswith("_")):
                continue
            # The base package itself exports a few names; they are not components.
            if parts[1] in {"get_include", "get_library_dir", "__version__", "local_cluster"}:
                continue
            assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_every_component_is_in_the_table() -> None:
    packages = {
        str(path.parent.relative_to(ROOT))
        for path in files()
        if path.name == "__init__.py" and path.parent.parent in (ROOT, ROOT / "common")
    }
    assert packages == set(MAY_IMPORT)


def test_the_core_knows_neither_python_nor_the_benchmark() -> None:
    for path in (ROOT / "cython_ext" / "src").iterdir():
        included = re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"))
        assert "Python.h" not in included, path
        # The benchmark's limits know nothing of the core, and the core nothing of them.
        if not path.stem.startswith("limits"):
            assert not [name for name in included if name.startswith("limits")], path


def test_every_call_with_a_handle_is_tried_in_a_forked_child() -> None:
    # These read what never changes.
    constant = {
        "mp_engine_address",
        "mp_engine_incarnation",
        "mp_plan_count",
        "mp_region_get_info",
        "mp_transfer_count",
    }
    native = ROOT / "cython_ext"
    tried = (native / "tests" / "engine_fork_test.cpp").read_text(encoding="utf-8")
    for header in ("engine.h", "testing.h"):
        text = (native / "include" / "moonpool" / header).read_text(encoding="utf-8")
        for name, arguments in re.findall(r"^MP_API [^;(]*?(\w+)\(([^;]*)\);", text, re.MULTILINE):
            if re.search(r"\bmp_(engine|region|peer|plan|transfer) \*\w", arguments) and name not in constant:
                assert f"{name}(" in tried, f"{name}: what does it do in a forked child?"


def test_every_source_names_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in sources()
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text(encoding="utf-8")[:300]
    ]
    assert not missing


def test_files_are_about_one_thing() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := path.read_text(encoding="utf-8").count("\n")) > LINES_MAX
    }
    assert not long, f"over {LINES_MAX} lines; split them"


def test_nothing_is_left_for_later() -> None:
    # Spelled in two pieces so that this file does not find itself.
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    for path in sources():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert marks.search(line) is None, f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in (path for path in files() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
