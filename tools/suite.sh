#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs one suite and notes how long it took: tools/suite.sh NAME COMMAND...
# The notes of all suites are in build/suites.txt; `tools/suite.sh --summary` prints them.
set -euo pipefail

notes=build/suites.txt

if [[ ${1-} == --summary ]]; then
  [[ -f $notes ]] || exit 0
  echo "--- minutes of each suite"
  awk -F'\t' '
    !($1 in minutes) { names[++count] = $1 }
    { minutes[$1] += $2 / 60000; total += $2 / 60000; outcome[$1] = $3 }
    END {
      for (i = 1; i <= count; i++) printf "%7.2f  %-16s %s\n", minutes[names[i]], names[i], outcome[names[i]]
      printf "%7.2f  total\n", total
    }' "$notes"
  exit 0
fi

name=$1
shift
echo "--- $name"
mkdir -p build
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
start=$(milliseconds)
status=0
"$@" || status=$?
outcome=passed
((status == 0)) || outcome="FAILED ($status)"
printf '%s\t%s\t%s\n' "$name" "$(($(milliseconds) - start))" "$outcome" >>"$notes"
exit "$status"
