# SPDX-License-Identifier: Apache-2.0
#
# moonpool.proto: messages, their types, and gRPC stubs, generated from ../proto/pool.proto.
set(proto_folder "${CMAKE_CURRENT_SOURCE_DIR}/../proto")
set(proto_generated "${CMAKE_CURRENT_BINARY_DIR}/generated")
set(proto_modules
  "${proto_generated}/moonpool/proto/pool_pb2.py"
  "${proto_generated}/moonpool/proto/pool_pb2.pyi"
  "${proto_generated}/moonpool/proto/pool_pb2_grpc.py")
file(MAKE_DIRECTORY "${proto_generated}")

add_custom_command(
  OUTPUT ${proto_modules}
  # The folder is given the name that it has as a package: generated modules import each other by it.
  COMMAND "${Python_EXECUTABLE}" -m grpc_tools.protoc "-Imoonpool/proto=${proto_folder}"
    "--python_out=${proto_generated}" "--pyi_out=${proto_generated}" "--grpc_python_out=${proto_generated}"
    moonpool/proto/pool.proto
  DEPENDS "${proto_folder}/pool.proto"
  VERBATIM)
add_custom_target(moonpool_proto ALL DEPENDS ${proto_modules})
install(FILES ${proto_modules} DESTINATION moonpool/proto)
