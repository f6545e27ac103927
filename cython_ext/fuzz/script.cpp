// SPDX-License-Identifier: Apache-2.0
#include "script.hpp"

#include <algorithm>
#include <random>

extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t size_max);

namespace moonpool::fuzz {

namespace {

constexpr size_t kStepBytesMax = 4096;
// Long scripts reach nothing that short ones do not, and take their time.
constexpr size_t kStepsMax = 24;

std::string join(const std::vector<ScriptStep> &steps) {
  ScriptWriter writer;
  for (const ScriptStep &step : steps) writer.step_bytes(step.what, step.bytes);
  return writer.text();
}

void mutate_bytes(std::string *bytes) {
  const size_t before = bytes->size();
  bytes->resize(std::min(kStepBytesMax, before + 64));
  bytes->resize(
      LLVMFuzzerMutate(reinterpret_cast<uint8_t *>(bytes->data()), std::min(before, bytes->size()), bytes->size()));
}

void mutate_script(std::vector<ScriptStep> *steps, std::minstd_rand *random) {
  const auto any = [&] { return static_cast<size_t>((*random)() % steps->size()); };
  const auto place = [&](size_t at) { return steps->begin() + static_cast<std::ptrdiff_t>(at); };
  switch (steps->empty() ? 0 : (*random)() % 8) {
    case 0:
      steps->insert(place((*random)() % (steps->size() + 1)), {static_cast<uint8_t>((*random)()), {}});
      break;
    case 1: {
      const ScriptStep copy = (*steps)[any()];
      steps->insert(place(any()), copy);
      break;
    }
    case 2:
      steps->erase(place(any()));
      break;
    case 3:
      std::swap((*steps)[any()], (*steps)[any()]);
      break;
    case 4:
      (*steps)[any()].what = static_cast<uint8_t>((*random)());
      break;
    default:
      mutate_bytes(&(*steps)[any()].bytes);
  }
}

}  // namespace

std::vector<ScriptStep> parse_script(const uint8_t *data, size_t size) {
  std::vector<ScriptStep> steps;
  Source source(data, size);
  while (!source.empty() && steps.size() < kStepsMax) {
    const auto what = source.get<uint8_t>();
    const auto bytes = source.get<uint16_t>();
    steps.push_back({what, std::string(source.take(bytes))});
  }
  return steps;
}

ScriptWriter &ScriptWriter::step_bytes(uint8_t what, std::string_view bytes) {
  append(&text_, what);
  append(&text_, static_cast<uint16_t>(bytes.size()));
  text_.append(bytes);
  return *this;
}

}  // namespace moonpool::fuzz

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned seed) {
  using namespace moonpool::fuzz;
  std::minstd_rand random(seed);
  // Now and then without regard for steps, so that broken scripts are seen too.
  if (random() % 16 == 0) return LLVMFuzzerMutate(data, size, size_max);
  std::vector<ScriptStep> steps = parse_script(data, size);
  for (unsigned i = 1 + random() % 3; i > 0; --i) mutate_script(&steps, &random);
  const std::string text = join(steps);
  const size_t n = std::min(text.size(), size_max);
  std::copy_n(text.data(), n, data);
  return n;
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t *first, size_t first_size, const uint8_t *second,
                                            size_t second_size, uint8_t *out, size_t out_size, unsigned seed) {
  using namespace moonpool::fuzz;
  std::minstd_rand random(seed);
  const std::vector<ScriptStep> a = parse_script(first, first_size), b = parse_script(second, second_size);
  std::vector<ScriptStep> steps;
  const size_t head = a.empty() ? 0 : random() % (a.size() + 1), tail = b.empty() ? 0 : random() % (b.size() + 1);
  steps.insert(steps.end(), a.begin(), a.begin() + static_cast<std::ptrdiff_t>(head));
  steps.insert(steps.end(), b.begin() + static_cast<std::ptrdiff_t>(tail), b.end());
  const std::string text = join(steps);
  const size_t n = std::min(text.size(), out_size);
  std::copy_n(text.data(), n, out);
  return n;
}
