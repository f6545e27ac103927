# SPDX-License-Identifier: Apache-2.0
"""A pool of real processes under random faults and a checked workload; `make soak` runs the same for longer."""
