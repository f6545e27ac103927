// SPDX-License-Identifier: Apache-2.0
#include "link.hpp"

#include <algorithm>

namespace moonpool {

Error connection_ended(const std::string &peer, const char *path) {
  Error error = make_error(MP_PEER_LOST, "the connection to the peer ended", "the next transfer connects again");
  error.peer = peer;
  error.path = path;
  return error;
}

std::vector<std::unique_ptr<Transport>> all_transports() {
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(make_local_transport());
  transports.push_back(make_shm_transport());
  transports.push_back(make_cuda_ipc_transport());
  transports.push_back(make_rdma_transport());
  transports.push_back(make_tcp_transport());
  std::sort(transports.begin(), transports.end(), [](const auto &a, const auto &b) { return a->cost() < b->cost(); });
  return transports;
}

}  // namespace moonpool
