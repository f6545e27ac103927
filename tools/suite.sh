#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs one suite and notes how long it took, and how many cores it kept busy: tools/suite.sh NAME COMMAND...
# The notes of all suites are in build/suites.txt; `tools/suite.sh --summary` prints them, and which native tests failed.
set -euo pipefail

notes=build/suites.txt

if [[ ${1-} == --summary ]]; then
  [[ -f $notes ]] || exit 0
  echo "--- minutes of each suite, and the cores it kept busy"
  awk -F'\t' '
    !($1 in wall) { names[++count] = $1 }
    { wall[$1] += $2; busy[$1] += $3; total += $2; total_busy += $3; outcome[$1] = $4 }
    function line(wall, busy, name, outcome) {
      printf "%7.2f  %4.1f  %-16s %s\n", wall / 60000, wall ? busy / wall : 0, name, outcome
    }
    END {
      for (i = 1; i <= count; i++) line(wall[names[i]], busy[names[i]], names[i], outcome[names[i]])
      line(total, total_busy, "total", "")
    }' "$notes"
  # Native tests come long before the others: what failed is said again.
  find build -name '*.log.failed' -exec tail -v -n 40 {} +
  exit 0
fi

name=$1
shift
echo "--- $name"
mkdir -p build
status=0
# What `time` says goes into the variable, what the suite says where it always goes.
exec 3>&2 4>&1
TIMEFORMAT='%R %U %S'
spent=$({ time "$@" 1>&4 2>&3 3>&- 4>&-; } 2>&1) || status=$?
outcome=passed
((status == 0)) || outcome="FAILED ($status)"
awk -v name="$name" -v outcome="$outcome" '{ printf "%s\t%d\t%d\t%s\n", name, 1000 * $1, 1000 * ($2 + $3), outcome }' \
  <<<"$spent" >>"$notes"
exit "$status"
