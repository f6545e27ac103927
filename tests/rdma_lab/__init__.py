# SPDX-License-Identifier: Apache-2.0
"""An emulated machine with RDMA devices, and tests that run inside it.

`cpio.py` writes archives, `image.py` makes the kernel and the file system, `machine.py` boots them, `items.py` runs
the tests of `inside/` there and reports them here.
"""
