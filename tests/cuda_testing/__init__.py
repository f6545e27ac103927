# SPDX-License-Identifier: Apache-2.0
"""What the tests of memory of GPUs share."""
