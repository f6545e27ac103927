// SPDX-License-Identifier: Apache-2.0
// One TCP lane, serving side: reads requests, checks every descriptor against the regions, moves the bytes, answers.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

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
  // When it returns the lane does not touch `region` any more. A write goes on into nothing and answers "released";
  // a read that is being sent cannot go on, so the lane ends.
  void drop_region(const Region &region) override;

 private:
  enum class State { kHead, kTable, kPayload, kReply };
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
  void append_response(uint64_t payload_bytes);
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
};

}  // namespace moonpool
