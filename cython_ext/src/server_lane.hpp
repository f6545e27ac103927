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
  // Ends or waits out what the lane does with the region, as far as that could take long.
  virtual void drop_region(const Region &region) = 0;
};

}  // namespace moonpool
