// SPDX-License-Identifier: Apache-2.0
// What a session knows of a connection that serves requests of its client.
#pragma once

namespace moonpool {

class Region;

class ServerLane {
 public:
  virtual ~ServerLane() = default;
  virtual void start() = 0;
  // When it returns the lane touches no memory any more.
  virtual void close() = 0;
  virtual bool closed() const = 0;
  // After close(): waits for copies that the client makes itself, and keeps it from beginning more. False when one had
  // not ended by `until`, because the client was stopped in it.
  virtual bool settle(int64_t until) {
    static_cast<void>(until);
    return true;
  }
  // Ends or waits out what the lane does with the region, as far as that could take long.
  virtual void drop_region(const Region &region) = 0;
  // A port of this engine went up or down: for those whose clients use ports.
  virtual void rail_changed(uint32_t, bool) {}
  // So many marks have come, and with them all bytes that were sent before. Also once it is closed. Lanes whose answers
  // say that the bytes are in place have no need of marks.
  virtual bool marked(uint32_t) const { return true; }
};

}  // namespace moonpool
