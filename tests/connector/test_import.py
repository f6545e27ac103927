# SPDX-License-Identifier: Apache-2.0
"""vLLM imports the package in every process it has, also in those that only look at the class."""

from __future__ import annotations

import subprocess
import sys

SAY = """
import sys, threading
import moonpool.connector
heavy = {"vllm", "torch", "grpc", "numpy"} & set(sys.modules)
print(sorted(heavy), threading.active_count(), sorted(moonpool.connector.__all__))
"""


def test_importing_it_is_cheap_and_starts_nothing() -> None:
    said = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "[] 1 ['MoonpoolConnector']"
