// SPDX-License-Identifier: Apache-2.0
//
// The input of targets in which several things happen: a list of steps, each `u8 what, u16 bytes, bytes`. The mutator
// of script.cpp changes, moves and doubles whole steps, so that what comes behind a change keeps its meaning.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace moonpool::fuzz {

// Reads an input from its front. Beyond the end everything is 0.
class Source {
 public:
  explicit Source(std::string_view bytes) : left_(bytes) {}
  Source(const uint8_t *data, size_t size) : left_(reinterpret_cast<const char *>(data), size) {}

  template <class T>
  T get() {
    static_assert(std::is_integral_v<T>);
    T value = 0;
    const size_t n = std::min(sizeof value, left_.size());
    if (n > 0) std::memcpy(&value, left_.data(), n);
    left_.remove_prefix(n);
    return value;
  }
  // A number below `end`, which is not 0.
  size_t below(size_t end) { return get<uint8_t>() % end; }
  std::string_view take(size_t n) {
    const std::string_view bytes = left_.substr(0, n);
    left_.remove_prefix(bytes.size());
    return bytes;
  }
  std::string_view rest() { return take(left_.size()); }
  bool empty() const { return left_.empty(); }

 private:
  std::string_view left_;
};

struct ScriptStep {
  uint8_t what;
  std::string bytes;
};

std::vector<ScriptStep> parse_script(const uint8_t *data, size_t size);
// Writes a script; what seeds are made with.
class ScriptWriter {
 public:
  template <class... T>
  ScriptWriter &step(uint8_t what, T... values) {
    std::string bytes;
    (append(&bytes, values), ...);
    return step_bytes(what, bytes);
  }
  ScriptWriter &step_bytes(uint8_t what, std::string_view bytes);
  const std::string &text() const { return text_; }

 private:
  static void append(std::string *out, std::string_view value) { out->append(value); }
  static void append(std::string *out, const char *value) { out->append(value); }
  template <class T>
    requires std::is_integral_v<T>
  static void append(std::string *out, T value) {
    out->append(reinterpret_cast<const char *>(&value), sizeof value);
  }
  std::string text_;
};

// Changes one byte of a message that is otherwise right: `u8 position, u8 change`, where a change of 0 changes nothing.
// True when it changed something.
template <class T>
bool spoil(T *message, Source &source) {
  static_assert(std::is_trivially_copyable_v<T>);
  const size_t at = source.below(sizeof *message);
  const uint8_t change = source.get<uint8_t>();
  reinterpret_cast<uint8_t *>(message)[at] ^= change;
  return change != 0;
}

}  // namespace moonpool::fuzz
