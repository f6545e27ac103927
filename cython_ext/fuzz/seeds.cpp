// SPDX-License-Identifier: Apache-2.0
#include "seeds.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace moonpool::fuzz {

Seeds &Seeds::add(std::string name, std::string_view bytes) {
  all_.emplace_back(std::move(name), std::string(bytes));
  return *this;
}

bool Seeds::write(const std::string &folder) const {
  for (const auto &[name, bytes] : all_) {
    std::ofstream file(folder + "/seed-" + name, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) return false;
  }
  return true;
}

}  // namespace moonpool::fuzz

extern "C" int LLVMFuzzerInitialize(int *argc, char ***argv) {
  if (*argc != 3 || std::strcmp((*argv)[1], "--write-seeds") != 0) return 0;
  const bool written = moonpool::fuzz::seeds().write((*argv)[2]);
  if (!written) std::fprintf(stderr, "cannot write the seeds into %s\n", (*argv)[2]);
  std::exit(written ? 0 : 1);
}
