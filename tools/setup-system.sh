#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes sure that compilers and native libraries are there: installs what is missing with apt when run as root,
# otherwise says in one line what to install.
#
#   tools/setup-system.sh build    what building the package needs
#   tools/setup-system.sh test     that, and what the native unit tests need
#   tools/setup-system.sh fuzz     what building the package and the fuzz targets needs
set -euo pipefail

purpose=${1:?"usage: tools/setup-system.sh build|test|fuzz"}
python=${PYTHON:-python3}
missing=()

# need PACKAGE COMMAND...: PACKAGE (its Debian name) is missing when COMMAND fails.
need() {
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}

header() { echo "#include <$1>" | "${CXX:-c++}" -xc++ -E -; }
static_library() { [[ $("${CXX:-c++}" -print-file-name="$1") == */* ]]; }
# libFuzzer and the sanitizers' runtimes are packages of their own on some systems.
fuzzer() {
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }' |
    clang++ -xc++ -fsanitize=fuzzer,address,undefined - -o /dev/null
}
python_headers() { [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]; }

look() {
  missing=()
  need g++ "${CXX:-c++}" --version
  need cmake cmake --version
  need ninja-build ninja --version
  need libsodium-dev header sodium.h
  need libsodium-dev static_library libsodium.a
  need libxxhash-dev header xxhash.h
  need python3 "$python" --version
  need python3-venv "$python" -c "import ensurepip, venv"
  need python3-dev python_headers
  if [[ $purpose == test ]]; then
    need libgtest-dev header gtest/gtest.h
  elif [[ $purpose == fuzz ]]; then
    need clang clang++ --version
    need libclang-rt-dev fuzzer
    need llvm llvm-symbolizer --version
  fi
  if ((${#missing[@]})); then
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  fi
}

look
((${#missing[@]})) || exit 0

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  command -v apt-get >/dev/null && how="sudo apt-get install -y" || how="your package manager; the Debian names are:"
  echo "moonpool: cannot build yet. Missing: ${missing[*]}. Install with: $how ${missing[*]}" >&2
  exit 1
fi

echo "moonpool: installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
look
if ((${#missing[@]})); then
  echo "moonpool: still missing after apt-get install: ${missing[*]}" >&2
  exit 1
fi
