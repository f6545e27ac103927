# SPDX-License-Identifier: Apache-2.0
#
# The Python extension modules, and what the wheel carries for people who compile against the engine.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

# moonpool_cython(<module>): <module>.pyx -> <module>.cpp -> extension module moonpool.<module>
function(moonpool_cython module)
  set(pyx "${CMAKE_CURRENT_SOURCE_DIR}/${module}.pyx")
  set(generated "${CMAKE_CURRENT_BINARY_DIR}/${module}.cpp")
  set(depfile "${generated}.dep")
  add_custom_command(
    OUTPUT "${generated}"
    # --depfile makes a change of an included .pxd rebuild the module.
    COMMAND "${Python_EXECUTABLE}" -m cython -3 --cplus --fast-fail --depfile
      --module-name "moonpool.${module}" -I "${CMAKE_CURRENT_SOURCE_DIR}" "${pyx}" -o "${generated}"
    DEPENDS "${pyx}"
    DEPFILE "${depfile}"
    VERBATIM)
  python_add_library("${module}" MODULE "${generated}" WITH_SOABI)
  target_include_directories("${module}" PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/src")
  install(TARGETS "${module}" DESTINATION moonpool)
  install(FILES "${CMAKE_CURRENT_SOURCE_DIR}/${module}.pyi" DESTINATION moonpool)
endfunction()

moonpool_cython(_native)
target_link_libraries(_native PRIVATE moonpool)
set_target_properties(_native PROPERTIES INSTALL_RPATH "$ORIGIN/lib")

moonpool_cython(_limits)
target_link_libraries(_limits PRIVATE moonpool_limits)

moonpool_cython(_index)
target_link_libraries(_index PRIVATE moonpool_index)

install(TARGETS moonpool LIBRARY DESTINATION moonpool/lib)
install(FILES
  "${CMAKE_CURRENT_SOURCE_DIR}/include/moonpool/engine.h"
  "${CMAKE_CURRENT_SOURCE_DIR}/include/moonpool/testing.h"
  DESTINATION moonpool/include/moonpool)
install(FILES
  "${CMAKE_CURRENT_SOURCE_DIR}/moonpool_engine.pxd"
  "${CMAKE_CURRENT_SOURCE_DIR}/moonpool_testing.pxd"
  DESTINATION moonpool)
