# SPDX-License-Identifier: Apache-2.0
"""Stands in for Mooncake's programs: can be reached at its port, and does nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys

if os.environ.get("STAND_IN") == "server":
    sys.exit("the stand-in does not like to be started")
with socket.create_server(("127.0.0.1", int(re.search(r"--(?:rpc_)?port=(\d+)", " ".join(sys.argv))[1]))):  # type: ignore[index]
    signal.pause()
