// SPDX-License-Identifier: Apache-2.0
//
// What the threads of a run do: one stream is one user thread's worth of work, on either side.
#pragma once

#include <deque>
#include <optional>

#include "limits_threads.hpp"

namespace moonpool::limits {

// Keeps the time of every batch while there is room, then of every 2nd, 4th, ...
class Samples {
 public:
  explicit Samples(size_t capacity) : capacity_(capacity) { kept_.reserve(capacity); }

  void add(int64_t ns) {
    if (capacity_ == 0 || seen_++ % stride_ != 0) return;
    if (kept_.size() == capacity_) {
      for (size_t i = 0; 2 * i < kept_.size(); ++i) kept_[i] = kept_[2 * i];
      kept_.resize((kept_.size() + 1) / 2);
      stride_ *= 2;
      if ((seen_ - 1) % stride_ != 0) return;
    }
    kept_.push_back(ns);
  }
  const std::vector<int64_t> &kept() const { return kept_; }

 private:
  size_t capacity_;
  uint64_t seen_ = 0;
  uint64_t stride_ = 1;
  std::vector<int64_t> kept_;
};

struct Work {
  mpl_op op;
  mpl_mode mode;
  int64_t duration_ns;
  const int32_t *stop;

  bool stopped() const { return stop != nullptr && __atomic_load_n(stop, __ATOMIC_RELAXED) != 0; }
  Header header(Header::Kind kind, uint64_t batch) const {
    Header made;
    made.kind = kind;
    made.op = op;
    made.batch = batch;
    made.duration_ns = duration_ns;
    return made;
  }
};

// What one stream did. Written by its own threads, read after they have ended.
struct Outcome {
  explicit Outcome(size_t samples_capacity) : samples(samples_capacity) {}
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  uint64_t batches = 0;
  Samples samples;
};

// One user thread's batches, one after the other, each cut over `width` threads that meet after every batch.
class PacedStream {
 public:
  PacedStream(const Work &work, const Walk &walk, uint64_t next_batch, size_t width, size_t samples_capacity)
      : work_(work),
        walk_(walk),
        next_(next_batch),
        width_(width),
        gate_(static_cast<uint32_t>(width - 1)),
        outcome_(samples_capacity) {}
  virtual ~PacedStream() = default;

  virtual void staff(Crew &crew) {
    crew.add([this] { lead(); });
    for (size_t index = 1; index < width_; ++index) crew.add([this, index] { help(index); });
  }
  virtual const Outcome &outcome() { return outcome_; }

 protected:
  // Moves share `index` of batch next_. False: the run has failed.
  virtual bool move(size_t index) = 0;
  virtual bool failed() const = 0;
  // The last words of thread `index`, outside the window.
  virtual void finish(size_t index) = 0;

  const Work &work_;
  Walk walk_;
  uint64_t next_;
  size_t width_;

 private:
  // The first thread counts and keeps the time, the others follow it batch by batch.
  void lead() {
    const bool alone = width_ == 1;
    outcome_.begin_ns = outcome_.end_ns = now_ns();
    for (bool more = true; more;) {
      if (!alone) gate_.release();
      const bool done = move(0);
      if (!alone) gate_.wait_for_helpers();
      if (!done || failed()) break;
      const int64_t at_ns = now_ns();
      outcome_.samples.add(at_ns - outcome_.end_ns);
      outcome_.end_ns = at_ns;
      ++outcome_.batches;
      ++next_;
      more = at_ns - outcome_.begin_ns < work_.duration_ns && !work_.stopped();
    }
    over_ = true;
    if (!alone) gate_.release();
    if (!failed()) finish(0);
    if (!alone) gate_.wait_for_helpers();
  }

  void help(size_t index) {
    for (uint32_t round = 0;; ++round) {
      gate_.wait_for_release(round);
      if (over_) break;
      move(index);
      gate_.arrive();
    }
    if (!failed()) finish(index);
    gate_.arrive();
  }

  Gate gate_;
  bool over_ = false;  // published by gate_

 protected:
  Outcome outcome_;
};

class CopyStream final : public PacedStream {
 public:
  CopyStream(const Work &work, const mpl_list &destination, const Walk &source, uint64_t next_batch, size_t width,
             size_t samples_capacity)
      : PacedStream(work, source, next_batch, width, samples_capacity), destination_(destination) {}

 private:
  bool move(size_t index) override {
    const mpl_list &source = *walk_.list;
    Share share = share_of(walk_, next_, index, width_);
    for (size_t d = share.first; share.bytes > 0; ++d, share.skip = 0) {
      const uint64_t length = std::min(static_cast<uint64_t>(source.lengths[d]) - share.skip, share.bytes);
      std::memcpy(static_cast<char *>(destination_.memory) + destination_.offsets[d] + share.skip,
                  static_cast<const char *>(source.memory) + source.offsets[d] + share.skip, length);
      share.bytes -= length;
    }
    return true;
  }
  bool failed() const override { return false; }
  void finish(size_t) override {}

  const mpl_list &destination_;
};

// ---------------------------------------------------------------- client

class ClientStream final : public PacedStream {
 public:
  ClientStream(const Work &work, const Walk &walk, uint64_t next_batch, std::vector<Lane> lanes, Failure &failure,
               size_t samples_capacity)
      : PacedStream(work, walk, next_batch, lanes.size(), samples_capacity),
        lanes_(std::move(lanes)),
        failure_(failure),
        ended_(lanes_.size(), 0) {}

  void staff(Crew &crew) override {
    if (work_.mode == MPL_ACKED) return PacedStream::staff(crew);
    for (size_t index = 0; index < width_; ++index) crew.add([this, index] { flow(index); });
  }

  const Outcome &outcome() override {
    if (work_.mode == MPL_STREAM) outcome_.end_ns = *std::max_element(ended_.begin(), ended_.end());
    return outcome_;
  }

 private:
  Pieces share(size_t index, uint64_t batch) const { return {*walk_.list, share_of(walk_, batch, index, width_)}; }
  Pieces nothing() const { return {*walk_.list, Share{}}; }

  bool move(size_t index) override {
    Header header = work_.header(Header::kBatch, next_);
    Lane &lane = lanes_[index];
    if (work_.op == MPL_WRITE) return lane.send(header, share(index, next_)) && lane.receive_byte();
    return lane.send(header, nothing()) && lane.receive_pieces(share(index, next_));
  }
  bool failed() const override { return failure_.failed(); }
  void finish(size_t index) override { say_end(index); }

  bool say_end(size_t index) {
    Header header = work_.header(Header::kEnd, next_);
    return lanes_[index].send(header, nothing()) && lanes_[index].receive_byte();
  }

  // MPL_STREAM: every connection on its own.
  void flow(size_t index) {
    const int64_t begin_ns = now_ns();
    if (index == 0) outcome_.begin_ns = begin_ns;
    const std::optional<uint64_t> batches = work_.op == MPL_WRITE ? pour(index, begin_ns) : drink(index);
    ended_[index] = now_ns();
    if (index == 0 && batches) outcome_.batches = *batches;
  }

  std::optional<uint64_t> pour(size_t index, int64_t begin_ns) {
    uint64_t batch = 0;
    for (; tickets_.take(batch, index == 0, begin_ns + work_.duration_ns, work_.stop); ++batch) {
      Header header = work_.header(Header::kBatch, next_ + batch);
      if (!lanes_[index].send(header, share(index, next_ + batch))) return {};
    }
    if (!say_end(index)) return {};
    return batch;
  }

  std::optional<uint64_t> drink(size_t index) {
    Header header = work_.header(Header::kBatch, next_);
    if (!lanes_[index].send(header, nothing())) return {};
    for (uint64_t batch = 0;; ++batch) {
      if (!lanes_[index].receive(header, share(index, next_ + batch))) return {};
      if (header.kind == Header::kEnd) return batch;
      if (header.batch != next_ + batch) {
        failure_.set(MPL_PROTOCOL, 0, "the server sent batch %llu where %llu is due",
                     static_cast<unsigned long long>(header.batch), static_cast<unsigned long long>(next_ + batch));
        return {};
      }
    }
  }

  std::vector<Lane> lanes_;
  Failure &failure_;
  Tickets tickets_;
  std::vector<int64_t> ended_;
};

// ---------------------------------------------------------------- server

class ServerStream {
 public:
  ServerStream(const Work &work, const Walk &walk, uint64_t next_batch, uint32_t runs, std::vector<Lane> lanes,
               Failure &failure)
      : work_(work),
        walk_(walk),
        next_(lanes.size(), next_batch),
        lanes_(std::move(lanes)),
        failure_(failure),
        tickets_(runs) {}

  void staff(Crew &crew) {
    for (size_t index = 0; index < lanes_.size(); ++index) {
      crew.add([this, index] {
        for (Tickets &tickets : tickets_)
          if (!serve(index, tickets)) return;
      });
    }
  }

  uint64_t next_batch() const { return next_[0]; }

 private:
  Pieces share(size_t index) const { return {*walk_.list, share_of(walk_, next_[index], index, lanes_.size())}; }
  Pieces nothing() const { return {*walk_.list, Share{}}; }

  bool serve(size_t index, Tickets &tickets) {
    Lane &lane = lanes_[index];
    for (;;) {
      Header header;
      if (!lane.receive(header, work_.op == MPL_WRITE ? share(index) : nothing())) return false;
      if (header.kind == Header::kEnd) return lane.send_byte();
      if (!expected(header, next_[index])) return false;
      if (work_.mode == MPL_STREAM && work_.op == MPL_READ) return pour(index, header, tickets);
      if (work_.op == MPL_READ && !lane.send_pieces(share(index))) return false;
      if (work_.op == MPL_WRITE && work_.mode == MPL_ACKED && !lane.send_byte()) return false;
      ++next_[index];
    }
  }

  bool pour(size_t index, const Header &request, Tickets &tickets) {
    const int64_t end_ns = now_ns() + request.duration_ns;
    for (uint64_t batch = 0; tickets.take(batch, index == 0, end_ns, nullptr); ++batch, ++next_[index]) {
      Header header = work_.header(Header::kBatch, next_[index]);
      if (!lanes_[index].send(header, share(index))) return false;
    }
    Header header = work_.header(Header::kEnd, next_[index]);
    return lanes_[index].send(header, nothing());
  }

  bool expected(const Header &header, uint64_t batch) {
    if (header.op == work_.op && header.batch == batch) return true;
    return failure_.set(MPL_PROTOCOL, 0, "the client asked for op %u batch %llu where op %d batch %llu is due",
                        header.op, static_cast<unsigned long long>(header.batch), work_.op,
                        static_cast<unsigned long long>(batch));
  }

  const Work &work_;
  Walk walk_;
  std::vector<uint64_t> next_;
  std::vector<Lane> lanes_;
  Failure &failure_;
  std::deque<Tickets> tickets_;  // one per run; a Tickets cannot be moved
};

}  // namespace moonpool::limits
