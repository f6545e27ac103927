# SPDX-License-Identifier: Apache-2.0
"""What master, nodes and clients of a pool say to each other.

``moonpool.proto.pool_pb2`` (messages) and ``moonpool.proto.pool_pb2_grpc`` (stub and servicer) are generated from
``pool.proto`` when the package is built.
"""
