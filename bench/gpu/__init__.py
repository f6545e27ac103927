# SPDX-License-Identifier: Apache-2.0
"""The check of a GPU host, ``deploy/gpu_check.py``."""
