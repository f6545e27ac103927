# SPDX-License-Identifier: Apache-2.0
"""Programs compiled against what the wheel installs: the header, the library and the Cython declarations."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

import moonpool

HERE = Path(__file__).parent
COMPILER = os.environ.get("CC") or shutil.which("cc") or "cc"


def run(*command: str | os.PathLike[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def link_flags() -> list[str]:
    library_dir = moonpool.get_library_dir()
    return [f"-I{moonpool.get_include()}", f"-L{library_dir}", "-lmoonpool", f"-Wl,-rpath,{library_dir}"]


@pytest.fixture(scope="module")
def c_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("consumer") / "consumer"
    strict = ["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    run(COMPILER, *strict, HERE / "consumer.c", "-o", program, *link_flags())
    return program


@pytest.fixture(scope="module")
def cython_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("consumer")
    source = folder / "consumer.c"
    module = folder / f"consumer{sysconfig.get_config_var('EXT_SUFFIX')}"
    run(sys.executable, "-m", "cython", "-3", HERE / "consumer.pyx", "-o", source)
    include = sysconfig.get_path("include")
    run(COMPILER, "-shared", "-fPIC", "-O1", f"-I{include}", source, "-o", module, *link_flags())
    spec = importlib.util.spec_from_file_location("consumer", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(("transports", "path"), [("auto", "local"), ("tcp", "tcp")])
def test_a_c_program_moves_blocks(c_program: Path, transports: str, path: str) -> None:
    assert run(c_program, transports) == f"3 blocks over {path}\n"


def test_a_compiled_module_and_python_share_one_engine(cython_module: ModuleType) -> None:
    from moonpool.transfer_engine import TransferEngine

    with TransferEngine("owner") as engine:
        region = engine.allocate(8192, name="kv")
        memoryview(region)[:] = bytes(range(256)) * 32
        into = bytearray(4096)
        # "local" is possible only between engines of one copy of the library.
        assert cython_module.read(engine.address.encode(), b"kv", into) == "local"
        assert into == bytes(range(256)) * 16


def test_a_compiled_module_and_python_agree_on_digests(cython_module: ModuleType) -> None:
    from moonpool.transfer_engine import digest

    data = bytes(range(256)) * 3000
    assert cython_module.digest(data) == digest(data)


def test_the_library_exports_its_c_face_and_nothing_else() -> None:
    library = Path(moonpool.get_library_dir()) / "libmoonpool.so"
    names = {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    headers = Path(moonpool.get_include(), "moonpool").glob("*.h")
    declared = "".join(header.read_text(encoding="utf-8") for header in headers)
    assert {name for name in names if not name.startswith("mp_")} == set()
    assert all(f"{name}(" in declared for name in names)
    assert "mp_engine_open" in names


def test_the_library_needs_only_the_system() -> None:
    library = Path(moonpool.get_library_dir()) / "libmoonpool.so"
    needed = {
        line.split("[")[1].split(".so")[0] for line in run("readelf", "-d", library).splitlines() if "NEEDED" in line
    }
    assert needed <= {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", "ld-linux-x86-64"}
