// SPDX-License-Identifier: Apache-2.0
//
// Every target says which inputs its corpus begins with. They are made with the core's own encoders, so they follow the
// format: `<target> --write-seeds FOLDER` writes them.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moonpool::fuzz {

class Seeds {
 public:
  Seeds &add(std::string name, std::string_view bytes);
  // False when a file cannot be written.
  bool write(const std::string &folder) const;

 private:
  std::vector<std::pair<std::string, std::string>> all_;
};

// Defined by each target.
Seeds seeds();

}  // namespace moonpool::fuzz
