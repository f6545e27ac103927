// SPDX-License-Identifier: Apache-2.0
// Which transport moves what: the cheapest that both ends offer and that takes the transfer. A path that fails is taken
// out, tried again later, and what it left goes on over the next one.
#include <algorithm>

#include "engine.hpp"
#include "peer.hpp"
#include "staged_run.hpp"

namespace moonpool {

namespace {

std::string join(const std::vector<std::string> &names) {
  std::string text;
  for (const std::string &name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::string short_text(const Error &error) {
  return error.cause.empty() ? error.message : error.message + ": " + error.cause;
}

}  // namespace

std::vector<Peer::Path> Peer::possible_paths(const std::vector<Offer> &offers, const Id128 &incarnation) const {
  const Config &config = engine_->config;
  std::vector<Path> paths;
  for (const auto &transport : engine_->transports) {
    const std::string name = transport->name();
    const bool required = config.require.empty() || config.require == name;
    const auto &allowed = config.transports;
    if (!required || std::find(allowed.begin(), allowed.end(), name) == allowed.end()) continue;
    Path path;
    path.transport = transport.get();
    const auto offer = std::find_if(offers.begin(), offers.end(), [&](const Offer &o) { return o.transport == name; });
    if (offer == offers.end()) {
      path.why_not = "the peer does not offer it";
    } else {
      path.offered = true;
      path.offer = offer->blob;
      path.why_not = transport->unreachable(*engine_, incarnation, offer->blob);
    }
    path.possible = path.why_not.empty();
    paths.push_back(std::move(path));
  }
  return paths;
}

// The first time before it is connected, then whenever one of its ports has changed.
void Peer::on_offers(std::vector<Offer> offers) {
  std::vector<std::pair<std::shared_ptr<Link>, std::string>> news;
  {
    std::lock_guard lock(mutex_);
    offers_ = std::move(offers);
    for (Path &path : paths_) {
      const auto offer = std::find_if(offers_.begin(), offers_.end(),
                                      [&](const Offer &one) { return one.transport == path.transport->name(); });
      if (offer == offers_.end() || !path.offered || offer->blob == path.offer) continue;
      path.offer = offer->blob;
      if (path.link != nullptr) news.emplace_back(path.link, path.offer);
    }
  }
  for (const auto &[link, offer] : news) link->offered(offer);
  reconsider_paths();
}

void Peer::reconsider_paths() {
  std::lock_guard lock(mutex_);
  for (Path &path : paths_) ask_again_locked(path);
}

// Whether the path is possible by now.
void Peer::ask_again_locked(Path &path) const {
  if (path.possible || !path.offered || !path.transport->comes_back()) return;
  path.why_not = path.transport->unreachable(*engine_, incarnation_, path.offer);
  path.possible = path.why_not.empty();
  if (path.possible) {
    path.backoff.reset();
    path.retry_at = 0;
  } else {
    path.backoff.grow();
    path.retry_at = now_ns() + path.backoff.wait_ns();
  }
}

// The peer has announced itself; the first path is connected before it counts as connected.
void Peer::on_sync() {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kConnecting || !paths_.empty()) return;
    paths_ = possible_paths(offers_, incarnation_);
  }
  advance();
}

// While connecting: tries the next path, or gives up.
void Peer::advance() {
  Transport *next = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kConnecting) return;
    for (const bool for_gpus : {false, true}) {
      for (Path &path : paths_) {
        if (path.transport->for_gpus_only() != for_gpus || !path.possible || !path.why_not.empty()) continue;
        next = path.transport;
        path.connecting = true;
        break;
      }
      if (next != nullptr) break;
    }
  }
  if (next != nullptr) return connect_path(*next);
  std::vector<std::string> theirs, reasons;
  Error lost;
  {
    std::lock_guard lock(mutex_);
    lost = lost_locked();
    for (const Offer &offer : offers_) theirs.push_back(offer.transport);
    for (const Path &path : paths_) reasons.push_back(std::string(path.transport->name()) + ": " + path.why_not);
  }
  if (lost) return fail_connect(std::move(lost));
  const std::string &require = engine_->config.require;
  Error error = make_error(MP_TRANSPORT_UNAVAILABLE,
                           require.empty() ? "no transport that both sides allow reaches the peer"
                                           : "the required transport \"" + require + "\" does not reach the peer",
                           "this engine may use " + join(engine_->config.transports) + ", the peer offers " +
                               join(theirs) + "; change `transports` or `require`");
  for (const std::string &reason : reasons) error.cause += (error.cause.empty() ? "" : "; ") + reason;
  fail_connect(describe(std::move(error), ""));
}

void Peer::connect_path(Transport &transport) {
  std::string offer;
  uint64_t connection;
  const int64_t now = now_ns();
  int64_t deadline = now + int64_t{engine_->config.connect_timeout_ms} * kMillisecond;
  {
    std::lock_guard lock(mutex_);
    const auto path = find_path_locked(transport.name());
    if (path == paths_.end()) return;
    offer = path->offer;
    connection = connection_;
    // Half of the time that is left, so that the next path has some too, and the cause of a failure is told.
    if (state_ == State::kConnecting) deadline = std::min(deadline, now + (connect_deadline_ - now) / 2);
  }
  transport.connect(shared_from_this(), offer, deadline,
                    [weak = weak_from_this(), connection, offer, name = std::string(transport.name())](
                        std::shared_ptr<Link> link, const Error &error) {
                      const auto self = weak.lock();
                      if (self != nullptr && self->on_path(connection, name, offer, link, error)) return;
                      if (link != nullptr) link->shutdown(make_error(MP_CLOSED, "the peer was closed"), true);
                    });
}

// False when nobody waits for this path any more.
bool Peer::on_path(uint64_t connection, const std::string &name, const std::string &offer,
                   const std::shared_ptr<Link> &link, const Error &error) {
  bool first;
  std::string news;  // that came while it was connected
  std::vector<std::shared_ptr<Transfer>> waiting;
  std::vector<Orphan> parked;
  {
    std::lock_guard lock(mutex_);
    const auto path = find_path_locked(name);
    if (connection != connection_ || path == paths_.end()) return false;
    path->connecting = false;
    path->link = link;
    if (link == nullptr) {
      out_of_use_locked(*path, error);
    } else {
      path->why_not.clear();
      path->backoff.reset();
      if (path->offer != offer) news = path->offer;
    }
    first = state_ == State::kConnecting;
    if (!first) waiting.swap(waiting_);
    if (!first) parked.swap(parked_);
  }
  if (!news.empty()) link->offered(news);
  if (first && link != nullptr) become_ready();
  if (first && link == nullptr) advance();
  for (const auto &transfer : waiting) submit(transfer);
  for (Orphan &one : parked) move_on(std::move(one.work), nullptr, one.cause);
  return true;
}

void Peer::out_of_use_locked(Path &path, const Error &cause) {
  path.link.reset();
  path.why_not = short_text(cause);
  path.lost = cause.code == MP_PEER_LOST || cause.code == MP_CONNECT || cause.code == MP_CLOSED;
  path.backoff.grow();
  path.retry_at = now_ns() + path.backoff.wait_ns();
}

// A peer that restarts or cuts its clients off ends a path a moment before its control connection, or refuses the path
// a moment after it.
Error Peer::lost_locked() const {
  const auto path =
      std::find_if(paths_.begin(), paths_.end(), [](const Path &one) { return one.link == nullptr && one.lost; });
  if (path == paths_.end()) return {};
  Error error = make_error(MP_PEER_LOST, "the peer went away", "the next transfer connects again");
  error.path = path->transport->name();
  error.cause = path->why_not;
  return error;
}

std::vector<Peer::Path>::iterator Peer::find_path_locked(const std::string &name) {
  return std::find_if(paths_.begin(), paths_.end(), [&](const Path &path) { return path.transport->name() == name; });
}

// The path for a transfer, but not `except`. nullptr: keep the transfer until a path is connected, or `*error` says why
// there is none.
std::shared_ptr<Link> Peer::route(const Transfer &transfer, const Link *except, Error *error) {
  for (;;) {
    Transport *connect = nullptr;
    {
      std::lock_guard lock(mutex_);
      // Lost since the caller looked: that is no lack of paths, and submit() knows what to do.
      if (state_ != State::kReady) return nullptr;
      bool wait = false;
      for (Path &path : paths_) {
        // Not every port says that it is back.
        if (!path.possible && path.retry_at <= now_ns()) ask_again_locked(path);
        if (path.link != nullptr) {
          const bool excepted = except != nullptr && path.link->is(*except);
          if (!excepted && path.link->takes(transfer)) return path.link;
        } else if (!path.transport->suits(transfer)) {
          continue;
        } else if (path.connecting) {
          wait = true;
        } else if (path.possible && path.retry_at <= now_ns()) {
          path.connecting = true;
          connect = path.transport;
          break;
        }
      }
      if (connect == nullptr && !wait && !(*error = lost_locked())) {
        *error = make_error(MP_TRANSPORT_UNAVAILABLE, "no path to the peer takes this transfer",
                            "allow \"tcp\" in `transports`, or see why the peer's path is a fallback");
        error->cause = fallback_locked();
      }
    }
    if (connect == nullptr) return nullptr;
    connect_path(*connect);
  }
}

void Peer::path_failed(const Link &link, const Error &cause) {
  std::lock_guard lock(mutex_);
  for (Path &path : paths_) {
    if (path.link == nullptr || !path.link->is(link)) continue;
    engine_->stats.paths_failed.fetch_add(1);
    return out_of_use_locked(path, cause);
  }
}

void Peer::move_on(std::vector<Work> work, const Link *from, const Error &cause) {
  for (const Work &one : work) {
    Error error;
    std::shared_ptr<Link> link;
    do {
      if (one.transfer->stopping()) break;
      link = route(*one.transfer, from, &error);
      // Another thread may be connecting the path.
    } while (link == nullptr && !error && !park(one, cause));
    if (link != nullptr) {
      engine_->stats.retries.fetch_add(1);
      one.transfer->set_carrier(link);
      link->adopt({one}, cause);
    } else if (error && one.transfer->device != nullptr && !one.transfer->stopping()) {
      engine_->stats.retries.fetch_add(1);
      StagedRun::adopt(one);
    } else if (error || one.transfer->stopping()) {
      fail_work({one}, cause);
    }
  }
}

// False when a path has been connected meanwhile, or was given up: then it is to be looked for again.
bool Peer::park(const Work &work, const Error &cause) {
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kReady) {
      const bool coming = std::any_of(paths_.begin(), paths_.end(), [](const Path &path) { return path.connecting; });
      if (coming) parked_.push_back({{work}, cause});
      return coming;
    }
  }
  fail_work({work}, cause);
  return true;
}

// One that is connected, or else one that route() would connect for the transfer.
const Peer::Path *Peer::current_path_locked() const {
  if (state_ != State::kReady) return nullptr;
  for (const Path &path : paths_) {
    if (path.link != nullptr && path.link->usable() && !path.transport->for_gpus_only()) return &path;
  }
  const int64_t now = now_ns();
  for (const Path &path : paths_) {
    if (path.transport->for_gpus_only()) continue;
    if (path.link == nullptr && (path.connecting || (path.possible && path.retry_at <= now))) return &path;
  }
  const auto only = std::find_if(paths_.begin(), paths_.end(),
                                 [](const Path &path) { return path.link != nullptr && path.link->usable(); });
  return only == paths_.end() ? nullptr : &*only;
}

std::string Peer::fallback() const {
  std::lock_guard lock(mutex_);
  return fallback_locked();
}

// Why the paths are not used that would be cheaper than the one in use.
std::string Peer::fallback_locked() const {
  const Path *const current = current_path_locked();
  const bool gpus = engine_->has_gpu_memory();
  bool dearer = false;  // than the current one
  std::string text;
  for (const Path &path : paths_) {
    const bool counts = path.transport->for_gpus_only() ? gpus : !dearer;
    const std::string reason = path.link != nullptr ? path.link->shortcoming() : path.why_not;
    if (counts && !reason.empty()) {
      text += (text.empty() ? "" : "; ") + std::string(path.transport->name()) + ": " + reason;
    }
    dearer = dearer || &path == current;
  }
  return text;
}

std::vector<std::shared_ptr<Link>> Peer::links_locked() const {
  std::vector<std::shared_ptr<Link>> links;
  for (const Path &path : paths_) {
    if (path.link != nullptr) links.push_back(path.link);
  }
  return links;
}

}  // namespace moonpool
