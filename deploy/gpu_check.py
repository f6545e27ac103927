#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks Moonpool on a GPU and writes one report. ``gpu_check.py --help`` and docs/gpu.md teach it.

Needs a host with an NVIDIA GPU and ``pip install 'moonpool[bench]'``.
"""

from moonpool.bench.gpu.command import main

main()
