// SPDX-License-Identifier: Apache-2.0
#include "link.hpp"

#include <algorithm>

namespace moonpool {

std::vector<std::unique_ptr<Transport>> all_transports() {
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(make_local_transport());
  transports.push_back(make_shm_transport());
  transports.push_back(make_rdma_transport());
  transports.push_back(make_tcp_transport());
  std::sort(transports.begin(), transports.end(), [](const auto &a, const auto &b) { return a->cost() < b->cost(); });
  return transports;
}

}  // namespace moonpool
