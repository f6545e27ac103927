# SPDX-License-Identifier: Apache-2.0
#
# moonpool_flags: how our own sources are compiled. Code that Cython generates does not use it: its warnings are not
# ours to repair.
add_library(moonpool_flags INTERFACE)
target_compile_options(moonpool_flags INTERFACE -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees an overlap, or a copy of half the address space, in `"text" + std::string`:
  # https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105651, id=105329
  target_compile_options(moonpool_flags INTERFACE -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
endif()
if(MOONPOOL_WERROR)
  target_compile_options(moonpool_flags INTERFACE -Werror)
endif()

# -g1 has the lines that stacks need. With -g, GCC 12 follows every variable through the sanitizer's checks: one of our
# test files then takes 300 s to compile instead of 5.
if(MOONPOOL_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=address,undefined)
elseif(MOONPOOL_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=thread)
elseif(MOONPOOL_SANITIZE)
  message(FATAL_ERROR "MOONPOOL_SANITIZE=${MOONPOOL_SANITIZE} is unknown. Try: address, thread, or leave it empty")
endif()
