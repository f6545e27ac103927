// SPDX-License-Identifier: Apache-2.0
// One TCP lane, serving side: reads requests, checks every descriptor against the regions, moves the bytes, answers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_stager.hpp"
#include "io_thread.hpp"
#include "region.hpp"
#include "server_lane.hpp"
#include "stream.hpp"
#include "wire.hpp"

namespace moonpool {

class Engine;

class TcpServerLane final : public Handler, public ServerLane, public std::enable_shared_from_this<TcpServerLane> {
 public:
  TcpServerLane(Engine &engine, IoThread &io, Fd fd);
  ~TcpServerLane() override;

  void start() override;
  void close() override;
  bool closed() const override;
  bool settle(int64_t until) override;
  // When it returns the lane does not touch `region` any more. A write goes on into nothing and answers "released";
  // a read that is being sent cannot go on, so the lane ends.
  void drop_region(const Region &region) override;

 private:
  // kWaiting: for pinned memory, or for a copy to it.
  enum class State { kHead, kTable, kWaiting, kPayload, kReply };
  enum class Progress { kMore, kBlocked, kBroken };

  void on_events(uint32_t events) override;
  Progress step_locked();
  Progress read_head();
  Progress read_table();
  Progress read_payload();
  Progress write_reply();
  Progress begin_request();
  void check_descs();
  void finish_write();
  Progress begin_read_reply();
  uint64_t good_bytes() const;
  void append_response(const wire::RequestHeader &request, const std::vector<wire::FailedDesc> &failed,
                       uint64_t payload_bytes);
  bool flush_acks();
  Progress moved(const Step &step);
  Progress protocol_error();
  void watch(uint32_t events);
  void close_locked();

  Engine &engine_;
  IoThread &io_;
  mutable std::mutex mutex_;
  bool closed_ = false;
  uint32_t watched_ = 0;
  uint64_t turn_bytes_ = 0;
  State state_ = State::kHead;

  wire::RequestHead head_;  // the next request's; filled while the payload of the present one is read
  size_t head_got_ = 0;
  wire::RequestHeader request_;
  std::vector<wire::WireDesc> descs_;
  size_t table_got_ = 0;
  std::vector<uint8_t *> addresses_;
  std::vector<wire::FailedDesc> failed_;  // ordered by desc
  RequestChecker checker_;
  PayloadReader reader_;
  PayloadWriter writer_;
  std::string acks_;  // responses without payload that were not sent yet
  unsigned acks_waiting_ = 0;
  std::string reply_head_;

  // ---- descriptors of memory of a device, see tcp_server_stage.cpp
  // A write whose bytes came, and whose answer waits until they are in place, or for an earlier one.
  struct Landing {
    wire::RequestHeader request;
    std::vector<wire::FailedDesc> failed;
    std::vector<uint32_t> on_device;  // what fails if the copy does
    uint64_t device_bytes = 0;
    uint64_t good_bytes = 0;
    bool over = false;
  };
  // The copies that were begun for the lane, which go on when it ends.
  class Copies {
   public:
    void begin();
    void end();
    bool none() const;
    bool wait(int64_t until);

   private:
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    unsigned running_ = 0;
  };
  enum class Fetch { kNone, kRunning, kOver };

  mp_status note_device(uint32_t desc, const Region &region);
  Progress admit();
  Progress wait();
  Progress begin_payload();
  void want_slot();
  uint8_t *place_of(uint32_t desc) const;
  std::vector<cuda::Copy> device_copies(std::vector<uint32_t> *which);
  void fetch();
  void fail_device_descs(mp_status status);
  void land();
  void landed(Landing &landing, const Error &error);
  void answer_landed();
  void resume(const std::function<void()> &change);
  void run_turn_locked();
  void watch_stall_locked();
  void check_stall();

  std::shared_ptr<const cuda::DeviceMemory> device_;  // of a descriptor of this request; nullptr: none is
  std::vector<bool> on_device_;
  std::vector<uint64_t> offsets_;  // in the pinned memory, of those on a device
  uint64_t staged_bytes_ = 0;
  std::shared_ptr<cuda::Slot> slot_;
  bool slot_wanted_ = false;
  Fetch fetch_ = Fetch::kNone;
  std::deque<std::shared_ptr<Landing>> landings_;
  const std::shared_ptr<Copies> copies_ = std::make_shared<Copies>();
  int64_t progress_at_ = 0;
  bool stall_watched_ = false;
};

}  // namespace moonpool
