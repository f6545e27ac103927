// SPDX-License-Identifier: Apache-2.0
//
// Bytes over the rdma transport: every shape of transfer arrives as it was, over every rail.
#include "support_rdma.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

TEST_F(EngineRdma, AWriteAndARead) {
  open();
  EXPECT_STREQ(info().path, "rdma");
  EXPECT_STREQ(info().fallback, "");
  for (const mp_op op : {MP_WRITE, MP_READ}) expect_moved(op, {{0, 0, static_cast<int64_t>(bytes_)}});
  EXPECT_EQ(moved_by("tcp"), 0);
  EXPECT_EQ(moved_by("rdma"), static_cast<int64_t>(2 * bytes_));
}

}  // namespace
}  // namespace moonpool
