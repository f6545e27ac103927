// SPDX-License-Identifier: Apache-2.0
#include "link.hpp"

#include <algorithm>

namespace moonpool {

std::vector<std::unique_ptr<Transport>> all_transports() {
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(make_local_transport());
  transports.push_back(make_tcp_transport());
  return transports;
}

Transport *choose_path(const std::vector<std::unique_ptr<Transport>> &transports,
                       const std::vector<std::string> &allowed, const Reach &reach) {
  const auto has = [](const std::vector<std::string> &list, const char *name) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  Transport *best = nullptr;
  for (const auto &transport : transports) {
    if (!has(allowed, transport->name()) || !has(reach.offers, transport->name()) || !transport->reaches(reach)) {
      continue;
    }
    if (best == nullptr || transport->cost() < best->cost()) best = transport.get();
  }
  return best;
}

}  // namespace moonpool
