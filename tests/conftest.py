# SPDX-License-Identifier: Apache-2.0
"""What every test needs: an environment without the user's settings, and property tests without a clock."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# No deadline: on a loaded machine it would fail for no fault of the code. Failures print a blob that repeats them.
settings.register_profile(
    "moonpool", deadline=None, print_blob=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("moonpool")

# Before any test module is imported, and inherited by every process a test starts.
for _variable in [name for name in os.environ if name.startswith("MOONPOOL_")]:
    del os.environ[_variable]

# A shell starts background jobs with SIGINT ignored, and every process that a test starts would inherit that. Then
# Ctrl-C does nothing, and a test of it waits for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
