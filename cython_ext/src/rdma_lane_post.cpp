// SPDX-License-Identifier: Apache-2.0
// How an RDMA lane turns slices of transfers into chains of work requests.
#include <algorithm>

#include "engine.hpp"
#include "rdma_lane.hpp"
#include "rdma_link.hpp"
#include "rdma_memory.hpp"

namespace moonpool {

namespace {

// Slices in flight on one lane: enough that the device always has the next one, few enough that other rails find work.
constexpr size_t kFramesInFlight = 8;
constexpr uint64_t kBytesInFlight = 4u << 20;
// A rail on another NUMA node than the memory is taken when so many bytes are under way on those nearby.
// For memory of a GPU that is another host bridge, another node, or the other side of the machine.
constexpr uint64_t kFarBytes = 256u << 10;
constexpr uint64_t kMessageMax = 1u << 30;  // RC allows 2^31; what every device takes

}  // namespace

uint64_t RdmaLane::distance(const Transfer &transfer) const {
  return transfer.locals.empty() ? 0 : transfer.locals.front()->distance(rail_->device_index) * kFarBytes;
}

bool RdmaLane::start_frame_locked() {
  const bool over = engine_.rdma->queue_pairs_wanted() && now_ns() >= turn_ends_;
  const bool full = over || going_back_ || frames_.size() >= kFramesInFlight || used_ >= queue_->depth() ||
                    load_.load(std::memory_order_relaxed) >= kBytesInFlight;
  if (full || !ready_.load(std::memory_order_relaxed)) return false;
  Work work;
  do {
    if (!link_.pull(&work)) return false;
    if (work.transfer->stopping()) fail_work({work}, {});
  } while (work.transfer->stopping());
  load_.fetch_add(work.bytes, std::memory_order_relaxed);
  work.transfer->driver.store(this, std::memory_order_relaxed);
  if (frames_.empty()) progress_at_ = now_ns();
  const uint32_t begin = work.begin;
  frames_.push_back({.work = std::move(work), .id = next_frame_++, .next = begin, .failed = {}});
  local_ = {};
  watch_progress_locked();
  return true;
}

// False while the peer has been asked for keys that the frame needs.
bool RdmaLane::keys_known_locked(const Frame &frame) {
  if (!asked_.empty()) return false;
  uint64_t last = 0;
  bool first = true;
  for (uint32_t i = frame.next; i < frame.work.end; ++i) {
    const uint64_t key = frame.work.transfer->descs[i].key;
    if (!first && key == last) continue;
    first = false;
    last = key;
    if (rdma_link_.remote_keys(remote_rail(), key) == nullptr && asked_.insert(key).second) {
      send_locked(rdma::kFind, key);
    }
  }
  return asked_.empty();
}

// True when something was posted.
bool RdmaLane::post_locked() {
  bool posted = false;
  for (;;) {
    if (frames_.empty() || frames_.back().next == frames_.back().work.end) {
      if (!start_frame_locked()) return posted;
    }
    Frame &frame = frames_.back();
    if (frame.next == frame.work.begin && frame.next_at == 0 && !keys_known_locked(frame)) return posted;
    const uint32_t room = std::min(kChainMax, queue_->depth() - used_);
    if (room == 0) return posted;
    const uint32_t n = build_locked(&frame, room);
    if (n == 0 && frame.next != frame.work.end) {
      if (!keys_known_locked(frame)) return posted;
    } else if (n > 0) {
      if (const int err = queue_->post(requests_.data())) {
        cut_locked(here(system_error(MP_TRANSPORT_UNAVAILABLE, err, "cannot post work requests")));
        return false;
      }
      used_ += n;
      ++frame.chains;
      frame.begun = true;
      chains_.push_back({n, frame.id});
      posted = true;
    } else if (frame.chains == 0 && frames_.size() == 1) {
      // Nothing of it could be posted at all.
      Frame done = std::move(frames_.front());
      frames_.pop_front();
      finish_locked(std::move(done));
    }
  }
}

const RdmaLane::Local *RdmaLane::find_local_locked(const Frame &frame, const Desc &desc) {
  const uint8_t *begin = desc.local, *end = desc.local + desc.length;
  if (begin >= local_.base && end <= local_.end) return &local_;
  for (const auto &region : frame.work.transfer->locals) {
    if (begin < region->base || end > region->base + region->length) continue;
    const std::shared_ptr<RdmaMemory> memory = region->rdma();
    if (memory == nullptr) continue;
    local_ = {region->base,    region->base + region->length, memory->piece_bytes(),
              memory->start(), region->device != nullptr,     memory->local_keys(rail_->device_index)};
    if (!local_.keys.empty()) return &local_;
  }
  local_ = {};
  return nullptr;
}

// Work requests for the next descriptors, linked, the last one signalled. Returns how many.
uint32_t RdmaLane::build_locked(Frame *frame, uint32_t room) {
  const Transfer &transfer = *frame->work.transfer;
  const bool write = transfer.op == MP_WRITE;
  const uint32_t pieces_max = queue_->pieces_max();
  std::shared_ptr<const rdma::Found> remote;
  uint64_t remote_key = 0;
  uint32_t n = 0;
  uint64_t bytes = 0;  // of the latest request
  const auto refuse = [&](mp_status status) {
    frame->failed.push_back({frame->next - frame->work.begin, static_cast<uint32_t>(status)});
    ++frame->next;
    frame->next_at = 0;
  };
  while (frame->next < frame->work.end) {
    const Desc &desc = transfer.descs[frame->next];
    if (transfer.stopping()) {
      refuse(MP_CANCELLED);
      continue;
    }
    if (remote == nullptr || desc.key != remote_key) {
      remote = rdma_link_.remote_keys(remote_rail(), desc.key);
      remote_key = desc.key;
    }
    // Forgotten since it was asked for, perhaps by another lane whose request did not fit it: asked again.
    if (remote == nullptr) break;
    const Local *local = find_local_locked(*frame, desc);
    if (remote->status != MP_OK || local == nullptr) {
      refuse(remote->status != MP_OK ? remote->status : MP_TRANSPORT_UNAVAILABLE);
      continue;
    }
    if (desc.length > remote->length || desc.offset > remote->length - desc.length) {
      refuse(MP_OUT_OF_RANGE);
      continue;
    }
    const uint64_t remote_at = remote->start + desc.offset + frame->next_at;
    const auto local_at = local->start + static_cast<uint64_t>(desc.local - local->base) + frame->next_at;
    const uint64_t remote_in = remote_at % remote->piece_bytes, local_in = local_at % local->piece_bytes;
    const uint64_t length = std::min(
        {desc.length - frame->next_at, remote->piece_bytes - remote_in, local->piece_bytes - local_in, kMessageMax});
    const uint32_t rkey = remote->keys[remote_at / remote->piece_bytes];
    ibv_send_wr *request = n == 0 ? nullptr : &requests_[n - 1];
    const bool joins = request != nullptr && request->wr.rdma.rkey == rkey &&
                       request->wr.rdma.remote_addr + bytes == remote_in &&
                       static_cast<uint32_t>(request->num_sge) < pieces_max && bytes + length <= kMessageMax;
    if (!joins) {
      if (n == room) break;
      request = &requests_[n];
      *request = {};
      request->sg_list = &pieces_[size_t{n} * pieces_max];
      request->opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
      request->wr.rdma.remote_addr = remote_in;
      request->wr.rdma.rkey = rkey;
      if (n > 0) requests_[n - 1].next = request;
      of_gpu_[n] = false;
      bytes = 0;
      ++n;
    }
    ibv_sge &piece = request->sg_list[request->num_sge++];
    piece = {reinterpret_cast<uintptr_t>(desc.local) + frame->next_at, static_cast<uint32_t>(length),
             local->keys[local_at / local->piece_bytes]};
    zero_based_[static_cast<size_t>(&piece - pieces_.data())] = local_in;
    of_gpu_[n - 1] = of_gpu_[n - 1] || local->of_gpu;
    bytes += length;
    frame->next_at += length;
    if (frame->next_at == desc.length) {
      ++frame->next;
      frame->next_at = 0;
    }
  }
  for (uint32_t i = 0; i < n; ++i) {
    ibv_send_wr &request = requests_[i];
    uint64_t total = 0;
    for (int k = 0; k < request.num_sge; ++k) total += request.sg_list[k].length;
    if (write && total <= queue_->inline_max() && !of_gpu_[i]) {
      // The bytes travel in the request itself, copied by the processor.
      request.send_flags |= IBV_SEND_INLINE;
      continue;
    }
    for (int k = 0; k < request.num_sge; ++k) {
      ibv_sge &piece = request.sg_list[k];
      piece.addr = zero_based_[static_cast<size_t>(&piece - pieces_.data())];
    }
  }
  if (frame->next == frame->work.end) n = mark_locked(frame, n);
  if (n > 0) requests_[n - 1].send_flags |= IBV_SEND_SIGNALED;
  return n;
}

// A notification comes after these bytes: the last request of the frame completes something at the peer too, which is
// what verbs promise to happen after the bytes of all requests before it are in place.
uint32_t RdmaLane::mark_locked(Frame *frame, uint32_t n) {
  Transfer &transfer = *frame->work.transfer;
  if (!transfer.has_notify || transfer.op != MP_WRITE || (n == 0 && !frame->begun)) return n;
  if (n == 0) {
    // What was to be the last could not be posted.
    requests_[n++] = {};
    requests_[0].opcode = IBV_WR_RDMA_WRITE;
  }
  requests_[n - 1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  transfer.note_mark(lane_id_, ++marks_);
  return n;
}

}  // namespace moonpool
