# SPDX-License-Identifier: Apache-2.0
"""Random traffic under random faults, checked by a model; `make soak` runs the same for longer."""
