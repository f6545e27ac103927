#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds and runs the native unit tests: tools/native-tests.sh [address|thread]
set -euo pipefail

sanitizer=${1-}
build=build/native${sanitizer:+-$sanitizer}

# Plain builds are optimised like the wheel. Under a sanitizer -O1 gives honest stacks at a bearable speed.
type=Release
[[ -z $sanitizer ]] || type=RelWithDebInfo
cmake -S cython_ext -B "$build" -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE="$type" \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1" \
  -DMOONPOOL_NATIVE_TESTS=ON -DMOONPOOL_WERROR=ON -DMOONPOOL_SANITIZE="$sanitizer" >/dev/null
cmake --build "$build" -- -j "${JOBS:-2}" --quiet

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/cython_ext/tests/tsan.supp

# The thread sanitizer of GCC before 14 cannot place its shadow memory on kernels with vm.mmap_rnd_bits above 28
# (https://github.com/google/sanitizers/issues/1716), so it runs without address randomisation where that is allowed.
runner=()
if [[ $sanitizer == thread ]] && setarch --addr-no-randomize true 2>/dev/null; then
  runner=(setarch --addr-no-randomize)
fi

# Most of the time of these tests is waiting, so parts of them run side by side, as many as there are cores.
run_part() {  # EXECUTABLE PART PARTS
  local log=$build/${1##*/}-$2.log
  GTEST_SHARD_INDEX=$2 GTEST_TOTAL_SHARDS=$3 "${runner[@]}" "$build/$1" --gtest_brief=1 --gtest_shuffle >"$log" 2>&1 && {
    echo "${1##*/}, part $(($2 + 1)) of $3: $(tail -n 2 "$log" | xargs)"
    return
  }
  cat "$log"
  mv "$log" "$log.failed"
  return 1
}
# What runs in the background does not hear Ctrl-C.
trap 'kill $(jobs -p) 2>/dev/null' INT TERM
running=0 failed=0
rm -f "$build"/*.log.failed
for part in moonpool_native_tests:{0..3}:4 rdma/moonpool_rdma_tests:{0..1}:2 gpu/moonpool_gpu_tests:0:1 index/moonpool_index_tests:0:1; do
  if ((running == ${JOBS:-2})); then
    wait -n || failed=1
    running=$((running - 1))
  fi
  IFS=: read -r executable number parts <<<"$part"
  run_part "tests/$executable" "$number" "$parts" &
  running=$((running + 1))
done
while ((running--)); do wait -n || failed=1; done
exit "$failed"
