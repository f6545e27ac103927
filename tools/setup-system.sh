#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes sure that compilers and native libraries are there: installs what is missing with apt when run as root,
# otherwise says in one line what to install.
#
#   tools/setup-system.sh build    what building the package needs
#   tools/setup-system.sh test     that, and what the native unit tests need
#   tools/setup-system.sh fuzz     what building the package and the fuzz targets needs
#   tools/setup-system.sh rdma-lab what building the package and the emulated machine of tests/rdma_lab needs; where that
#                                  cannot be, its tests skip, so this only says what is missing
set -euo pipefail

purpose=${1:?"usage: tools/setup-system.sh build|test|fuzz|rdma-lab"}
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
# The machine runs Debian's Python with the packages of this one.
lab_is_possible() {
  [[ $(uname -m) == x86_64 ]] && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'
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
  need libibverbs-dev header infiniband/verbs.h
  need python3 "$python" --version
  need python3-venv "$python" -c "import ensurepip, venv"
  need python3-dev python_headers
  if [[ $purpose == test ]]; then
    need libgtest-dev header gtest/gtest.h
    need etcd-server etcd --version
    need etcd-client etcdctl version
  elif [[ $purpose == fuzz ]]; then
    need clang clang++ --version
    need libclang-rt-dev fuzzer
    need llvm llvm-symbolizer --version
  elif [[ $purpose == rdma-lab ]]; then
    need qemu-system-x86 qemu-system-x86_64 --version
    need busybox-static busybox true
    need kmod command -v depmod
    need iproute2 command -v ip
    need ibverbs-utils command -v ibv_devinfo
    need ibverbs-providers test -f /etc/libibverbs.d/rxe.driver
    need perftest command -v ib_write_bw
    need python3-pyverbs test -d /usr/lib/python3/dist-packages/pyverbs
  fi
  if ((${#missing[@]})); then
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  fi
}

PATH+=:/usr/sbin:/sbin
[[ $purpose != rdma-lab ]] || lab_is_possible || exit 0
look
((${#missing[@]})) || exit 0

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
  command -v apt-get >/dev/null && how="sudo apt-get install -y" || how="your package manager; the Debian names are:"
  if [[ $purpose == rdma-lab ]]; then
    echo "moonpool: tests in the emulated machine will skip. Missing: ${missing[*]}. Install with: $how ${missing[*]}" >&2
    exit 0
  fi
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
