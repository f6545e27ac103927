// SPDX-License-Identifier: Apache-2.0
// The lane of the tcp transport: frames over a socket, straight from and into the caller's memory.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "lane.hpp"
#include "stream.hpp"

namespace moonpool {

class TcpLane final : public Lane {
 public:
  TcpLane(LaneLink &link, IoThread &io) : Lane(link, io, wire::kLane) {}

 private:
  struct Frame {
    Work work;
    uint64_t id;
    bool discard = false;           // nobody wants the bytes of this read any more
    bool resolved = false;          // its descriptors were reported already
    std::vector<uint64_t> digests;  // of a write, known when it was sent
  };

  void begin_locked() override;
  void on_events(uint32_t events) override;
  void drive_locked() override;
  void send_first_locked() override;
  void arm_locked() override;
  bool busy_locked() const override { return !frames_.empty(); }
  bool carries_locked(const Transfer &transfer) const override;
  void cancel_locked(const Transfer &transfer) override;
  std::vector<Work> take_unfinished_locked() override;
  std::optional<pollfd> sleep_on_locked() override;
  void sleep_ended_locked() override { assist_mask_ = 0; }

  bool send_locked();
  bool start_frame_locked();
  bool receive_locked();
  bool check_silence_locked();
  bool receive_header_locked();
  bool begin_payload_locked();
  void finish_frame_locked();
  bool can_start_locked() const;

  uint32_t armed_ = 0;        // what the I/O thread's epoll watches
  uint32_t assist_mask_ = 0;  // events that a sleeping waiter looks at itself

  std::deque<Frame> frames_;  // in flight, oldest first; the newest may still be being sent
  uint64_t next_frame_id_ = 1;
  uint64_t turn_bytes_ = 0;
  bool sending_ = false;
  uint64_t reads_in_flight_ = 0;  // bytes
  std::vector<uint8_t> request_;  // head and table of the frame being sent
  PayloadWriter writer_;

  wire::ResponseHeader header_;
  size_t header_got_ = 0;
  bool in_payload_ = false;
  std::vector<wire::FailedDesc> failed_;
  size_t failed_got_ = 0;
  PayloadReader reader_;
};

}  // namespace moonpool
