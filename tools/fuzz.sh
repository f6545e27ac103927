#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the fuzz targets and runs them, as many at once as there are cores (docs/hardening.md).
#
#   tools/fuzz.sh run [TARGET...]        look for faults: FUZZ_SECONDS each (20), or FUZZ_RUNS inputs each
#   tools/fuzz.sh replay TARGET FILE...  run a target once over each file
#   tools/fuzz.sh minimise [TARGET...]   keep of all that was found what reaches something of its own
#   tools/fuzz.sh coverage [TARGET...]   what the kept corpora reach, per source file
set -euo pipefail

usage="usage: tools/fuzz.sh run|minimise|coverage [TARGET...], or replay TARGET FILE..."
command=${1:?"$usage"}
shift
kept=cython_ext/fuzz/corpus  # in the repository
work=build/fuzz              # corpus/TARGET grows here, findings/ has what went wrong
export JOBS=${JOBS:-2}
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:quarantine_size_mb=16:malloc_context_size=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

all_targets() { (cd cython_ext/fuzz && for file in *_fuzz.cpp; do echo "${file%_fuzz.cpp}"; done); }

check_targets() {  # TARGET...
  local target
  for target in "$@"; do
    [[ -f cython_ext/fuzz/${target}_fuzz.cpp ]] && continue
    echo "there is no fuzz target \"$target\". Choose from: $(all_targets | xargs)" >&2
    exit 2
  done
}

build() {  # DIRECTORY CMAKE-OPTION...
  local directory=$1
  shift
  cmake -S cython_ext/fuzz -B "$directory" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ "$@" >/dev/null
  cmake --build "$directory" -- -j "$JOBS" --quiet
}

# Seeds are written anew each time, so they follow the format of the day.
write_seeds() {  # TARGET
  mkdir -p "$work/seeds/$1" "$work/corpus/$1" "$kept/$1"
  "$work/bin/$1_fuzz" --write-seeds "$work/seeds/$1"
}

# The limits end a run that hangs or eats memory; they are far above what any input takes, since machines pause.
fuzzer() {  # TARGET ARGUMENT...
  local target=$1
  shift
  "$work/bin/${target}_fuzz" -timeout=120 -report_slow_units=120 -rss_limit_mb=2048 -max_len=600 -entropic=0 "$@"
}

run_one() {  # TARGET
  local target=$1 log=$work/$1.log limits=("-max_total_time=${FUZZ_SECONDS:-20}")
  [[ -z ${FUZZ_RUNS-} ]] || limits=("-runs=$FUZZ_RUNS" "-max_total_time=${FUZZ_SECONDS:-0}")
  write_seeds "$target"
  if fuzzer "$target" "${limits[@]}" -print_final_stats=1 "-artifact_prefix=$work/findings/$target-" \
    "$work/corpus/$target" "$kept/$target" "$work/seeds/$target" >"$log" 2>&1; then
    local inputs reached
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    reached=$(sed -n 's/.* cov: \([0-9]*\) ft: \([0-9]*\) .*/\1 edges, \2 features/p' "$log" | tail -n 1)
    printf '%-16s %9s inputs, %s\n' "$target" "$inputs" "$reached"
    return
  fi
  {
    echo "$target: FAILED"
    grep -vE '^#[0-9]+\s|^INFO|# Uses:' "$log" | tail -n 60
    local found
    found=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
    [[ -z $found ]] || echo "$target: kept as $found. Replay with: tools/fuzz.sh replay $target $found"
  } >&2
  return 1
}

# So small that the repository stays small: one input for each edge, not for each number of times that it is passed.
minimise_one() {  # TARGET
  local target=$1 fresh=$work/minimised/$1
  write_seeds "$target"
  rm -rf "$fresh"
  mkdir -p "$fresh"
  fuzzer "$target" -merge=1 -use_counters=0 "$fresh" "$kept/$target" "$work/seeds/$target" "$work/corpus/$target" \
    >"$work/$target.log" 2>&1
  rm -rf "${kept:?}/$target"
  cp -r "$fresh" "$kept/$target"
  echo "$target: $(find "$kept/$target" -type f | wc -l) files"
}

coverage_one() {  # TARGET
  local target=$1 binary=$work/coverage/$1_fuzz profile=$work/coverage/$1
  LLVM_PROFILE_FILE=$profile.raw "$binary" -runs=0 "$kept/$target" >"$work/$target.log" 2>&1
  llvm-profdata merge -sparse "$profile.raw" -o "$profile.profile"
  echo "--- $target"
  llvm-cov report "$binary" "-instr-profile=$profile.profile" cython_ext/src cython_ext/index |
    awk '/^Filename/ { print "lines reached" } / / && $10 ~ /%/ && $9 != $8 { printf "%8s of %4d  %s\n", $10, $8, $1 }'
}

each() {  # FUNCTION TARGET...
  local what=$1
  shift
  (($#)) || mapfile -t targets < <(all_targets)
  (($#)) && targets=("$@")
  printf '%s\n' "${targets[@]}" | xargs -P "$JOBS" -I{} "$0" "$what" {}
}

case $command in
  run)
    check_targets "$@"
    build "$work/bin"
    mkdir -p "$work/findings"
    each run-one "$@"
    ;;
  replay)
    check_targets "${1:?"$usage"}"
    build "$work/bin"
    fuzzer "$1" "${@:2}"
    ;;
  minimise)
    check_targets "$@"
    build "$work/bin"
    each minimise-one "$@"
    ;;
  coverage)
    check_targets "$@"
    build "$work/coverage" -DFUZZ_COVERAGE=ON
    JOBS=1 each coverage-one "$@"
    ;;
  run-one) run_one "$1" ;;
  minimise-one) minimise_one "$1" ;;
  coverage-one) coverage_one "$1" ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
