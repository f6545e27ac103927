# SPDX-License-Identifier: Apache-2.0
#
# libsodium is linked statically and xxHash is header-only, so the built library needs nothing but libc, libstdc++
# and threads at run time.
find_package(Threads REQUIRED)

find_path(SODIUM_INCLUDE_DIR sodium.h)
find_library(SODIUM_STATIC_LIBRARY NAMES libsodium.a)
if(NOT SODIUM_INCLUDE_DIR OR NOT SODIUM_STATIC_LIBRARY)
  message(FATAL_ERROR "libsodium (header and static library) is missing. Try: apt-get install libsodium-dev")
endif()
add_library(moonpool_sodium INTERFACE)
target_include_directories(moonpool_sodium SYSTEM INTERFACE "${SODIUM_INCLUDE_DIR}")
target_link_libraries(moonpool_sodium INTERFACE "${SODIUM_STATIC_LIBRARY}")

find_path(XXHASH_INCLUDE_DIR xxhash.h)
if(NOT XXHASH_INCLUDE_DIR)
  message(FATAL_ERROR "xxhash.h is missing. Try: apt-get install libxxhash-dev")
endif()
add_library(moonpool_xxhash INTERFACE)
target_include_directories(moonpool_xxhash SYSTEM INTERFACE "${XXHASH_INCLUDE_DIR}")

# Only its headers: the library is opened at run time.
find_path(IBVERBS_INCLUDE_DIR infiniband/verbs.h)
if(NOT IBVERBS_INCLUDE_DIR)
  message(FATAL_ERROR "infiniband/verbs.h is missing. Try: apt-get install libibverbs-dev")
endif()
