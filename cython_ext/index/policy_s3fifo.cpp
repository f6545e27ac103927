// SPDX-License-Identifier: Apache-2.0
#include "policy_s3fifo.hpp"

#include <algorithm>

namespace moonpool::index {

void S3FifoPolicy::set_capacity(size_t chunks) {
  // What is remembered is forgotten, so small changes are none.
  if (capacity_ != 0 && alike(capacity_, chunks)) return;
  capacity_ = chunks;
  ghosts_.set_capacity(chunks);
}

void S3FifoPolicy::on_insert(uint32_t slot, uint32_t) {
  Chunk &chunk = chunks_[slot];
  uses(chunk) = 0;
  chunk.policy_c = ghosts_.take(chunk.name(seed_), 0) ? kInMain : 0;
  queue_of(chunk).add(slot);
}

void S3FifoPolicy::on_touch(uint32_t slot) { uses(chunks_[slot]) = std::min(kUsesMax, uses(chunks_[slot]) + 1); }

void S3FifoPolicy::on_remove(uint32_t slot, bool evicted) {
  Chunk &chunk = chunks_[slot];
  if (!parked(chunk)) queue_of(chunk).remove(slot);
  if (evicted && !in_main(chunk)) ghosts_.put(chunk.name(seed_), {0, 0}, 0);
}

void S3FifoPolicy::on_leaf(uint32_t slot, uint32_t) {
  Chunk &chunk = chunks_[slot];
  if (!parked(chunk)) return;
  chunk.policy_c &= ~kParked;
  queue_of(chunk).add_oldest(slot);
}

uint32_t S3FifoPolicy::victim(const MayGo &may_go, uint32_t *looks) {
  // Each may pass once, in the main queue once more for each use.
  size_t small_turns = small_.size(), main_turns = (small_.size() + main_.size()) * (kUsesMax + 1);
  for (; *looks > 0; --*looks) {
    const bool full = small_.size() > (small_.size() + main_.size()) / kSmallShare;
    const bool from_main = main_.size() > 0 && main_turns > 0;
    const bool from_small = small_.size() > 0 && small_turns > 0 && (full || !from_main);
    if (!from_small && !from_main) break;
    --(from_small ? small_turns : main_turns);
    PolicyList &queue = from_small ? small_ : main_;
    const uint32_t oldest = queue.oldest();
    Chunk &chunk = chunks_[oldest];
    if (chunk.warm_children != 0) {
      queue.remove(oldest);
      chunk.policy_c |= kParked;
    } else if (from_small && uses(chunk) > 1) {
      small_.remove(oldest);
      uses(chunk) = 0;
      chunk.policy_c |= kInMain;
      main_.add(oldest);
    } else if (from_main && !from_small && uses(chunk) > 0) {
      --uses(chunk);
      main_.renew(oldest);
    } else if (may_go(oldest)) {
      return oldest;
    } else {
      queue.renew(oldest);  // it is in use
    }
  }
  return kNone;
}

}  // namespace moonpool::index
