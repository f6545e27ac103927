# SPDX-License-Identifier: Apache-2.0
"""T15.

What people met: the pip wheel would not import: `libcudart`, `libmlx5`, ... missing, even in the "no CUDA" flavour.

What must happen instead: one wheel; imports in a bare container; a missing library is reported when its transport is
asked for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import moonpool
from moonpool.transfer_engine import TransferEngine, TransportUnavailableError, probe

# What a bare container with a C++ runtime has.
ALLOWED = ("libmoonpool", "libc.", "libm.", "libstdc++", "libgcc_s", "libpthread", "ld-linux", "linux-vdso")


def test_the_libraries_need_nothing_but_the_c_and_the_cpp_runtime() -> None:
    package = Path(moonpool.__file__).parent
    binaries = [*package.glob("*.so"), *Path(moonpool.get_library_dir()).glob("*.so*")]
    assert len(binaries) >= 2
    for binary in binaries:
        listed = subprocess.run(["ldd", binary], check=True, capture_output=True, text=True).stdout
        assert "not found" not in listed
        for line in listed.splitlines():
            assert Path(line.split()[0]).name.startswith(ALLOWED), line


def test_importing_loads_no_library_of_an_accelerator_or_a_nic() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import moonpool.transfer_engine; print(open('/proc/self/maps').read())"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "libmoonpool" in loaded
    for name in ("libcuda", "libibverbs", "libmlx", "librdmacm", "libtorch", "numpy"):
        assert name not in loaded


def test_a_transport_that_is_not_here_is_reported_when_it_is_asked_for() -> None:
    if any(transport.name == "rdma" and transport.available for transport in probe()):
        pytest.skip("this host has RDMA devices")
    with pytest.raises(TransportUnavailableError, match="rdma"):
        TransferEngine(transports="rdma")
