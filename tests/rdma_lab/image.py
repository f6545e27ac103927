# SPDX-License-Identifier: Apache-2.0
"""What the machine boots: Debian's kernel, and a file system with RDMA tools, Python and pytest.

Both are kept in build/rdma_lab. The file system is made again when an installed package, or this file, has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from rdma_lab.cpio import Archive

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "rdma_lab"
SITE = PurePosixPath("/lab/site")
PYTHON = "/usr/bin/python3.11"

# Command -> the package that has it.
_COMMANDS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "ip": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "setpriv": "util-linux",
}
_FILES = {
    "/usr/lib/python3/dist-packages/pyverbs/__init__.py": "python3-pyverbs",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    PYTHON: "python3.11",
}
# crc32_generic: no declared dependency of rxe, but without it no device comes up. virtio: the way tests are driven.
_MODULES = ["virtio_pci", "virtio_console", "crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "veth", "sch_netem"]
# dash for scripts: busybox's own shell takes its own ip before the one in PATH. bash for people.
_TOOLS = ["/usr/bin/busybox", "/usr/bin/dash", "/usr/bin/bash", "/usr/sbin/ip", "/usr/sbin/tc", "/usr/bin/rdma", PYTHON]
_PACKAGES = ["perftest", "ibverbs-utils", "python3-pyverbs", "libpython3.11-minimal", "libpython3.11-stdlib"]
_PROVIDER = ["/etc/libibverbs.d/rxe.driver", "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"]
_NOT_WANTED = re.compile(
    r"/usr/share/|/usr/lib/python3\.11/(test|idlelib|lib2to3|ensurepip|distutils|pydoc_data|turtledemo)/"
    r"|\.egg-info|/tests?/|/include/|\.pyi$|\.a$"
)
_DISTRIBUTIONS = ["pytest", "pytest-timeout", "numpy", "click", "rich"]
_UNUSED = 24 * 3600.0  # seconds after which the file system of another environment goes
# Folders that Debian has merged into /usr.
_MERGED = ("bin", "sbin", "lib", "lib64")


class ImageError(Exception):
    """The machine cannot be made; says why."""


@dataclass(frozen=True)
class Kernel:
    """Debian's kernel, and the modules that are needed in the order in which they are loaded."""

    folder: Path

    @property
    def binary(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def modules(self) -> list[Path]:
        return sorted(self.folder.glob("*.ko"))


def packages() -> set[str]:
    """Return what the host must have."""
    return {*_COMMANDS.values(), *_FILES.values()}


def missing() -> str | None:
    """Return why the machine cannot exist on this host, or None."""
    if platform.machine() != "x86_64" or sys.version_info[:2] != (3, 11):
        here = f"CPython {platform.python_version()} on {platform.machine()}"
        return (
            f"the emulated machine runs Debian's Python 3.11 on x86_64 with the packages of this one, which is {here}"
        )
    absent = {package for command, package in _COMMANDS.items() if not _which(command)}
    absent |= {package for file, package in _FILES.items() if not Path(file).exists()}
    try:
        _with_dependencies([*_DISTRIBUTIONS, "moonpool"])
    except metadata.PackageNotFoundError as error:
        return f"this Python, {sys.executable}, has no {error.name}. Use the one that make installs into"
    if absent:
        return f"not installed: {' '.join(sorted(absent))}. Run tools/setup-system.sh rdma-lab as root"
    return None


def _which(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str | Path, limit: float = 120.0, folder: Path | None = None) -> str:
    """Return what a command printed."""
    words = [_which(str(command[0])) or command[0], *command[1:]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise ImageError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes things; the others wait and find them."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare() -> tuple[Kernel, Path]:
    """Return the kernel and the archive of the file system, made now if need be."""
    with _alone():
        kernel = _kernel()
        return kernel, _base(kernel)


def _hash(*content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _kernel() -> Kernel:
    """Return the kernel that is there, or fetch the one that Debian's linux-image-amd64 stands for."""
    if kept := sorted(CACHE.glob(f"kernel-*-{_hash(_MODULES)}")):
        return Kernel(kept[-1])
    try:
        return _fetch_kernel()
    except ImageError:
        if os.geteuid() != 0:
            raise
        # Nothing was installed for a while: apt knows no kernel, or one that is no longer there.
        _run("apt-get", "update", limit=240)
        return _fetch_kernel()


def _fetch_kernel() -> Kernel:
    found = re.search(r"linux-image-(\S+)", _run("apt-cache", "depends", "linux-image-amd64").partition("\n")[2])
    if not found:
        raise ImageError("apt knows no linux-image-amd64. Run apt-get update as root")
    release = found[1]
    # What a process left that was killed, and kernels with other modules.
    for old in [*CACHE.glob("fetch-*"), *CACHE.glob("kernel-*")]:
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as folder:
        root, ready = Path(folder, "root"), Path(folder, "ready")
        _run("apt-get", "download", f"linux-image-{release}", limit=240, folder=Path(folder))
        (package,) = Path(folder).glob("*.deb")
        _run("dpkg-deb", "-x", package, root)
        _run("depmod", "-b", root, release)
        listed = [_run("modprobe", "-d", root, "-S", release, "--show-depends", name) for name in _MODULES]
        paths = [line.split()[1] for line in "".join(listed).splitlines() if line.startswith("insmod")]
        ready.mkdir()
        for number, path in enumerate(dict.fromkeys(paths)):
            shutil.copy(path, ready / f"{number:02}-{Path(path).name}")
        shutil.copy(root / "boot" / f"vmlinuz-{release}", ready / "vmlinuz")
        return Kernel(ready.rename(CACHE / f"kernel-{release}-{_hash(_MODULES)}"))


def _base(kernel: Kernel) -> Path:
    """Return the archive with everything but Moonpool and its tests."""
    installed = _run("dpkg-query", "-W", "-f", "${Package} ${Version}\n")
    wheels = [(one.name, one.version) for one in _with_dependencies(_DISTRIBUTIONS)]
    scripts = [Path(__file__).read_bytes(), (HERE / "cpio.py").read_bytes()]
    base = CACHE / f"base-{_hash(kernel.folder.name, installed, wheels, scripts)}.cpio"
    for old in CACHE.glob("base-*"):
        # Another environment may be using it now.
        if time.time() - old.stat().st_mtime > _UNUSED:
            old.unlink()
    if not base.exists():
        with tempfile.NamedTemporaryFile(dir=CACHE, prefix="base-", suffix=".part", delete=False) as stream:
            try:
                _write_base(Archive(stream), kernel)
                Path(stream.name).rename(base)
            except BaseException:
                Path(stream.name).unlink()
                raise
    base.touch()
    return base


def _write_base(archive: Archive, kernel: Kernel) -> None:
    for name in _MERGED:
        archive.folder(f"/usr/{name}")
        archive.link(f"/{name}", f"usr/{name}")
    for name in ("etc", "proc", "sys", "dev", "tmp", "root", "run", "var", "busybox"):
        archive.folder(f"/{name}")
    archive.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
    archive.text("/etc/hosts", "127.0.0.1 localhost\n")
    archive.link("/usr/bin/sh", "dash")
    archive.link("/usr/bin/python3", "python3.11")
    for module in kernel.modules:
        archive.file(f"/lab/modules/{module.name}", module)

    listed = _run("dpkg", "-L", *_PACKAGES).splitlines()
    paths = [Path(path) for path in [*_TOOLS, *_PROVIDER, *listed] if not _NOT_WANTED.search(path)]
    _add_system(archive, [path for path in paths if path.is_file()])
    for distribution in _with_dependencies(_DISTRIBUTIONS):
        add_distribution(archive, distribution)
    archive.close()


def _add_system(archive: Archive, paths: Iterable[Path]) -> None:
    """Add files of the host where they are there, with the libraries they need and Python's compiled files."""
    paths = list(paths)
    for path in [*paths, *_libraries(paths)]:
        archive.file(_merged(path), path)
        if path.suffix == ".py":
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.cpython-311.pyc"):
                archive.file(_merged(compiled), compiled)


def _merged(path: Path) -> PurePosixPath:
    return PurePosixPath("/usr", *path.parts[1:]) if path.parts[1] in _MERGED else PurePosixPath(path)


def _libraries(paths: Iterable[Path]) -> list[Path]:
    """Return the libraries of the system that programs and libraries need."""
    binaries = [path for path in paths if _is_binary(path)]
    # ldd complains of the static ones.
    output = subprocess.run(["ldd", *binaries], capture_output=True, text=True, timeout=120, check=False).stdout
    found = sorted(set(re.findall(r"(/\S+)(?= \(0x)", output)))
    return [Path(path) for path in found if path.startswith(("/lib", "/usr/lib"))]


def _is_binary(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


def _with_dependencies(names: Iterable[str]) -> list[metadata.Distribution]:
    """Return installed distributions and what they need."""
    found: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = metadata.distribution(name)
            needs = map(Requirement, found[name].requires or [])
            pending += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def add_distribution(archive: Archive, distribution: metadata.Distribution) -> None:
    """Add what pip installed, and the libraries of the system that it needs."""
    sources = {}
    for file in distribution.files or []:
        source = Path(str(distribution.locate_file(file)))
        if ".." not in file.parts and not _NOT_WANTED.search(str(file)) and source.is_file():
            sources[SITE / file] = source
    for path, source in sources.items():
        archive.file(path, source)
    _add_system(archive, _libraries(sources.values()))
