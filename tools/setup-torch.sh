#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs a CPU build of PyTorch into the virtual environment given, or says why the tests that use it will skip.
# On Linux a plain `pip install torch` may bring several GB of CUDA libraries, which a handful of tests do not need.
set -euo pipefail

pip=${1:?"usage: tools/setup-torch.sh VENV"}/bin/pip
python=$1/bin/python
requirement=$("$python" tools/requirements.py test-torch)

"$python" -c "import torch" 2>/dev/null && exit 0

# By the names of the packages: the descriptions that are in the report too speak of CUDA in every build.
names='import json, sys; print(*(package["metadata"]["name"] for package in json.load(sys.stdin)["install"]))'
plan=$("$pip" install --dry-run --quiet --report - "$requirement" 2>/dev/null | "$python" -c "$names" 2>/dev/null) || plan=""
if [[ -n $plan && $plan != *nvidia-* && $plan != *cuda-* ]]; then
  "$pip" install --quiet "$requirement"
else
  echo "moonpool: pip would not bring a CPU build of $requirement; install one into $1, or the tests that register torch tensors will skip" >&2
fi
