#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment with a vLLM that runs on CPUs, for the tests of the connector. Where pip cannot bring it,
# for want of a network or of a build for this Python, VENV/.stamps/missing says so, and those tests skip.
set -euo pipefail

usage="usage: tools/setup-vllm.sh VENV VLLM_REQUIREMENTS REQUIREMENTS"
venv=${1:?"$usage"} vllm=${2:?"$usage"} others=${3:?"$usage"}
missing=$venv/.stamps/missing

# Short of what pip does by itself, which is to try for minutes.
export PIP_RETRIES=2

"${PYTHON:-python3}" -m venv "$venv"
mkdir -p "$venv/.stamps"
rm -f "$missing"
tools/setup-torch.sh "$venv" || true
if "$venv/bin/python" -c "import torch" 2>/dev/null &&
  "$venv/bin/pip" install --quiet --no-deps -r "$vllm" && "$venv/bin/pip" install --quiet -r "$others"; then
  exit 0
fi
echo "moonpool: pip brought no vLLM that runs on CPUs (see above), so what needs it skips; to try again: rm -r $venv" |
  tee "$missing" >&2
