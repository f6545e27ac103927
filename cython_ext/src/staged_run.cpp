// SPDX-License-Identifier: Apache-2.0
#include "staged_run.hpp"

#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"

namespace moonpool {

namespace {

// Enough that copies and every lane have the next one, few enough that other transfers find pinned memory too.
constexpr size_t kPiecesMax = 16;

}  // namespace

// Descriptors [first, first + descs.size()) of the real transfer, with pinned memory in the place of the device's.
class StagedPiece final : public Transfer {
 public:
  StagedPiece(std::shared_ptr<StagedRun> run, uint32_t first_desc, uint32_t end_desc, cuda::Slot memory)
      : Transfer(run->real_->peer, run->real_->op, run->real_->digest, run->real_->deadline_ns),
        first(first_desc),
        run_(std::move(run)),
        slot_(std::move(memory)) {
    const Transfer &real = *run_->real_;
    count = end_desc - first;
    target_incarnation = real.target_incarnation;
    session = real.session;
    remote_on_device = real.remote_on_device;
    staged = true;
    uint8_t *at = slot_.data();
    for (uint32_t i = first; i < end_desc; ++i) {
      Desc desc = real.descs[i];
      desc.item = i - first;
      desc.items = 1;
      if (desc.on_device) {
        desc.local = at;
        at += desc.length;
        desc.on_device = false;
      }
      bytes += desc.length;
      descs.push_back(desc);
    }
    status_.assign(descs.size(), MP_PENDING);
    if (digest) digests_.assign(descs.size(), 0);
    left_.store(static_cast<uint32_t>(descs.size()));
  }

  // Of the descriptors that have not failed.
  std::vector<cuda::Copy> copies() const {
    std::vector<cuda::Copy> copies;
    for (uint32_t i = 0; i < descs.size(); ++i) {
      const Desc &wanted = run_->real_->descs[first + i];
      if (!wanted.on_device || status_[i] == MP_INTERNAL) continue;
      copies.push_back({reinterpret_cast<cuda::Pointer>(wanted.local), descs[i].local, wanted.length});
    }
    return copies;
  }

  void descs_done(uint32_t begin, uint32_t end, const uint64_t *moved) override {
    std::fill(status_.begin() + begin, status_.begin() + end, static_cast<uint8_t>(MP_OK));
    if (!digests_.empty() && moved != nullptr) std::copy(moved, moved + (end - begin), digests_.begin() + begin);
    reported(end - begin);
  }
  void descs_failed(uint32_t begin, uint32_t end, const Error &error) override {
    // The reason is told at once, and only once: what becomes of the others has to wait.
    std::fill(status_.begin() + begin, status_.begin() + end, static_cast<uint8_t>(MP_INTERNAL));
    run_->real_->descs_failed(first + begin, first + end, error);
    reported(end - begin);
  }
  void note_mark(uint64_t lane_id, uint32_t mark) override { run_->real_->note_mark(lane_id, mark); }
  // The peer stops what it has to settle later. The real one stops its pieces in turn.
  void stop(const Error &cause) override { run_->real_->stop(cause); }
  void stop_moving(const Error &cause) { Transfer::stop(cause); }

  // What did not fail is in place, or is not going to be.
  void report(const Error &error) {
    const std::shared_ptr<StagedRun> run = run_;
    slot_.reset();
    for (uint32_t begin = 0; begin < descs.size();) {
      uint32_t end = begin;
      while (end < descs.size() && status_[end] == status_[begin]) ++end;
      const uint32_t from = first + begin, until = first + end;
      if (status_[begin] == MP_OK) {
        if (error) {
          run->real_->descs_failed(from, until, error);
        } else {
          run->real_->descs_done(from, until, digests_.empty() ? nullptr : digests_.data() + begin);
        }
      }
      begin = end;
    }
    run->ended(std::static_pointer_cast<StagedPiece>(shared_from_this()));
  }

  const uint32_t first;

 private:
  void reported(uint32_t n) {
    if (left_.fetch_sub(n) != n) return;
    if (op == MP_WRITE) return report({});
    std::vector<cuda::Copy> landed = copies();
    if (landed.empty()) return report({});
    if (run_->real_->stopping()) return report(run_->real_->stop_cause());
    run_->stager_->copy(cuda::Stager::kToDevice, std::move(landed),
                        [self = std::static_pointer_cast<StagedPiece>(shared_from_this())](const Error &error) {
                          self->report(error);
                        });
  }

  const std::shared_ptr<StagedRun> run_;
  cuda::Slot slot_;
  std::vector<uint8_t> status_;  // per descriptor: MP_PENDING, MP_OK, or MP_INTERNAL when its failure was reported
  std::vector<uint64_t> digests_;
  std::atomic<uint32_t> left_{0};
};

void StagedRun::begin(const std::shared_ptr<Transfer> &transfer) {
  adopt({transfer, 0, static_cast<uint32_t>(transfer->descs.size()), transfer->bytes, 0});
}

void StagedRun::adopt(const Work &work) {
  const std::shared_ptr<Transfer> &transfer = work.transfer;
  if (!transfer->peer->engine().config.cuda_staging) {
    Error error = make_error(MP_TRANSPORT_UNAVAILABLE, "no path reaches the memory of the GPU by itself",
                             "cuda_staging=True lets it pass through the host");
    error.cause = transfer->peer->fallback();
    return transfer->descs_failed(work.begin, work.end, transfer->peer->describe(std::move(error), ""));
  }
  // What comes back in several parts is one run, so that a stop finds all of it.
  auto run = std::dynamic_pointer_cast<StagedRun>(transfer->carrier());
  if (run == nullptr) {
    run = std::make_shared<StagedRun>(transfer, transfer->peer->engine().staging.stager(transfer->device));
    transfer->set_carrier(run);
  }
  run->add(work.begin, work.end);
}

void StagedRun::add(uint32_t begin, uint32_t end) {
  {
    std::lock_guard lock(mutex_);
    rest_.emplace_back(begin, end);
  }
  go_on();
}

StagedRun::StagedRun(std::shared_ptr<Transfer> transfer, std::shared_ptr<cuda::Stager> stager)
    : real_(std::move(transfer)), stager_(std::move(stager)) {}

void StagedRun::go_on() {
  for (;;) {
    // A stop that came before the run was its carrier has not found it.
    if (real_->stopping()) return fail_rest(real_->stop_cause());
    {
      std::lock_guard lock(mutex_);
      if (waiting_ || rest_.empty() || pieces_.size() >= kPiecesMax) return;
      waiting_ = true;
    }
    cuda::Slot slot = stager_->try_slot(cuda::Stager::kOwn);
    if (!slot) break;
    begin_piece(std::move(slot));
  }
  stager_->want_slot(cuda::Stager::kOwn, [self = shared_from_this()](cuda::Slot slot, const Error &error) {
    if (error) return self->fail_rest(error);
    self->begin_piece(std::move(slot));
    self->go_on();
  });
}

bool StagedRun::take_next(uint32_t *begin, uint32_t *end) {
  if (rest_.empty()) return false;
  auto &[next, last] = rest_.front();
  *begin = *end = next;
  for (uint64_t bytes = 0; *end < last && *end - *begin < cuda::kPieceDescs; ++*end) {
    bytes += real_->descs[*end].length;
    if (bytes > cuda::kPieceBytes) break;
  }
  next = *end;
  if (next == last) rest_.pop_front();
  return *begin < *end;
}

void StagedRun::begin_piece(cuda::Slot slot) {
  std::shared_ptr<StagedPiece> piece;
  {
    std::lock_guard lock(mutex_);
    waiting_ = false;
    uint32_t begin, end;
    if (!take_next(&begin, &end)) return;
    piece = std::make_shared<StagedPiece>(shared_from_this(), begin, end, std::move(slot));
    pieces_.insert(piece);
  }
  if (real_->op == MP_READ) return send_later(piece);
  std::vector<cuda::Copy> copies = piece->copies();
  if (copies.empty()) return send_later(piece);
  stager_->copy(cuda::Stager::kToHost, std::move(copies), [self = shared_from_this(), piece](const Error &error) {
    if (error) return piece->fail(error);
    self->send_later(piece);
  });
}

// By an I/O thread: the stager has copies to begin, and the caller did not ask for a wait.
void StagedRun::send_later(const std::shared_ptr<StagedPiece> &piece) {
  real_->peer->engine().next_io().post([self = shared_from_this(), piece] { self->send(piece); });
}

void StagedRun::send(const std::shared_ptr<StagedPiece> &piece) {
  if (real_->stopping()) return piece->fail(real_->stop_cause());
  real_->peer->submit(piece);
}

void StagedRun::ended(const std::shared_ptr<StagedPiece> &piece) {
  if (const char *const path = piece->carried_by()) path_.store(path);
  {
    std::lock_guard lock(mutex_);
    pieces_.erase(piece);
  }
  go_on();
}

void StagedRun::fail_rest(const Error &error) {
  std::deque<std::pair<uint32_t, uint32_t>> rest;
  {
    std::lock_guard lock(mutex_);
    waiting_ = false;
    rest.swap(rest_);
  }
  for (const auto &[begin, end] : rest) real_->descs_failed(begin, end, error);
}

void StagedRun::cancel(Transfer &transfer) {
  const Error cause = transfer.stop_cause();
  std::vector<std::shared_ptr<StagedPiece>> pieces;
  {
    std::lock_guard lock(mutex_);
    pieces.assign(pieces_.begin(), pieces_.end());
  }
  fail_rest(cause);
  for (const auto &piece : pieces) piece->stop_moving(cause);
}

}  // namespace moonpool
