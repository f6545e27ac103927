#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs every linter, also after one failed, so that one run shows everything: tools/lint.sh BIN
set -euo pipefail

bin=$(cd "${1:?"usage: tools/lint.sh BIN"}" && pwd)
export PATH="$bin:$PATH"  # some linters call others by name
failed=()

check() {
  local name=$1
  shift
  if "$@"; then echo "$name: ok"; else failed+=("$name"); fi
}

files() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r file; do
  # A file that was deleted but not yet committed is still listed.
  [[ ! -f $file ]] || echo "$file"
done; }
mapfile -t native < <(files '*.h' '*.hpp' '*.c' '*.cpp')
mapfile -t cython < <(files '*.pyx' '*.pxd' '*.pxi')
mapfile -t scripts < <(files '*.sh' .ci/run)

# mypy looks at the installed package, from a folder with no sources in it, so that it sees what users see.
types() { (cd "$bin" && mypy --config-file "$OLDPWD/pyproject.toml" --cache-dir "$OLDPWD/.mypy_cache" -p moonpool); }

check "ruff format" ruff format --check --quiet .
check "ruff" ruff check --quiet .
check "mypy" types
check "clang-format" clang-format --dry-run -Werror --ferror-limit=5 "${native[@]}"
check "cython-lint" cython-lint "${cython[@]}"
check "codespell" codespell
check "shellcheck" shellcheck "${scripts[@]}"

if ((${#failed[@]})); then
  echo "lint: FAILED: $(IFS=,; echo "${failed[*]}"). Try: make fix" >&2
  exit 1
fi
