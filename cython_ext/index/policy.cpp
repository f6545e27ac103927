// SPDX-License-Identifier: Apache-2.0
#include "policy.hpp"

#include "policy_lru.hpp"
#include "policy_prefix.hpp"
#include "policy_s3fifo.hpp"

namespace moonpool::index {

std::unique_ptr<Policy> Policy::make(std::string_view name, Chunks &chunks, uint64_t seed) {
  if (name == "prefix") return std::make_unique<PrefixPolicy>(chunks, seed);
  if (name == "lru") return std::make_unique<LruPolicy>(chunks);
  if (name == "s3fifo") return std::make_unique<S3FifoPolicy>(chunks, seed);
  return nullptr;
}

}  // namespace moonpool::index
