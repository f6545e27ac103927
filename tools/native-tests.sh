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
for tests in tests/moonpool_native_tests tests/index/moonpool_index_tests tests/rdma/moonpool_rdma_tests; do
  "${runner[@]}" "$build/$tests" --gtest_brief=1 --gtest_shuffle
done
