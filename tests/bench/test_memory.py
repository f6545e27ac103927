# SPDX-License-Identifier: Apache-2.0
"""Memory that a second process of the benchmark finds and maps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from moonpool.bench.errors import BenchError
from moonpool.bench.memory import SharedFile, allocate, allocate_shared, file_of, map_file

NBYTES = 1 << 20


def test_another_process_maps_the_same_bytes() -> None:
    memory = allocate_shared(NBYTES)
    memory[:] = np.arange(NBYTES) % 251
    part = memory[8192:]
    file = file_of(part)
    assert file.offset % 4096 == 0
    script = (
        "import sys\n"
        "from moonpool.bench.memory import SharedFile, map_file\n"
        "pid, fd, offset, nbytes = map(int, sys.argv[1:])\n"
        "mapped = map_file(SharedFile(pid, fd, offset), nbytes)\n"
        "sys.stdout.buffer.write(mapped[:16].tobytes())\n"
        "mapped[:] = 7\n"
    )
    numbers = [str(number) for number in (file.pid, file.fd, file.offset, len(part))]
    done = subprocess.run([sys.executable, "-c", script, *numbers], check=True, stdout=subprocess.PIPE, timeout=100)
    assert done.stdout == bytes(index % 251 for index in range(8192, 8208))
    assert (part == 7).all()
    assert memory[8191] == 8191 % 251


def test_memory_that_cannot_be_mapped_says_why() -> None:
    with pytest.raises(BenchError, match="cannot be mapped by another process"):
        file_of(allocate(NBYTES))
    file = file_of(allocate_shared(NBYTES))
    with pytest.raises(BenchError, match=r"cannot be mapped: .*No such file"):
        map_file(replace(file, fd=1 << 20), NBYTES)
    assert SharedFile(1, 2, 3) != file


def test_memory_that_is_not_there_is_refused() -> None:
    for make in (allocate, allocate_shared):
        with pytest.raises(BenchError, match="more than this machine can spare"):
            make(1 << 60)
