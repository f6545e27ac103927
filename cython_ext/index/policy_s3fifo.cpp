// SPDX-License-Identifier: Apache-2.0
#include "policy_s3fifo.hpp"

#include <algorithm>

namespace moonpool::index {

void S3FifoPolicy::on_insert(uint32_t slot, uint32_t) {
  Chunk &chunk = chunks_[slot];
  uses(chunk) = 0;
  in_main(chunk) = ghosts_.take(hash_of(chunk)) ? 1 : 0;
  (in_main(chunk) != 0 ? main_ : small_).add(slot);
}

void S3FifoPolicy::on_touch(uint32_t slot) { uses(chunks_[slot]) = std::min(kUsesMax, uses(chunks_[slot]) + 1); }

void S3FifoPolicy::on_remove(uint32_t slot, bool evicted) {
  Chunk &chunk = chunks_[slot];
  const bool from_main = in_main(chunk) != 0;
  (from_main ? main_ : small_).remove(slot);
  if (!evicted || from_main) return;
  ghosts_.set_reach(small_.size() + main_.size());
  ghosts_.add(hash_of(chunk));
}

uint32_t S3FifoPolicy::victim(const MayGo &may_go, uint32_t *looks) {
  // Each may pass once, in the main queue once more for each use.
  size_t small_turns = small_.size(), main_turns = (small_.size() + main_.size()) * (kUsesMax + 1);
  for (; *looks > 0; --*looks) {
    const bool full = small_.size() > (small_.size() + main_.size()) / kSmallShare;
    const bool from_main = main_.size() > 0 && main_turns > 0;
    if (small_turns > 0 && small_.size() > 0 && (full || !from_main)) {
      --small_turns;
      const uint32_t oldest = small_.oldest();
      Chunk &chunk = chunks_[oldest];
      if (uses(chunk) > 1) {
        small_.remove(oldest);
        uses(chunk) = 0;
        in_main(chunk) = 1;
        main_.add(oldest);
      } else if (may_go(oldest)) {
        return oldest;
      } else {
        small_.renew(oldest);
      }
    } else if (from_main) {
      --main_turns;
      const uint32_t oldest = main_.oldest();
      Chunk &chunk = chunks_[oldest];
      if (uses(chunk) > 0) {
        --uses(chunk);
      } else if (may_go(oldest)) {
        return oldest;
      }
      main_.renew(oldest);
    } else {
      return kNone;
    }
  }
  return kNone;
}

}  // namespace moonpool::index
