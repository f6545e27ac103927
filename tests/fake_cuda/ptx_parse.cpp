// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <regex>
#include <stdexcept>

#include "ptx.hpp"

namespace fake {

namespace {

using Op = Instruction::Op;

const std::map<std::string, Op> kOps = {
    {"ld", Op::kLoad},    {"st", Op::kStore},      {"mov", Op::kMove},       {"cvt", Op::kMove}, {"cvta", Op::kMove},
    {"add", Op::kAdd},    {"sub", Op::kSub},       {"mul", Op::kMul},        {"mad", Op::kMad},  {"and", Op::kAnd},
    {"or", Op::kOr},      {"shl", Op::kShiftLeft}, {"shr", Op::kShiftRight}, {"min", Op::kMin},  {"setp", Op::kSetIf},
    {"bra", Op::kBranch}, {"ret", Op::kReturn},
};
const std::map<std::string, size_t> kSpecials = {
    {"%tid.x", 0},   {"%tid.y", 1},   {"%tid.z", 2},   {"%ntid.x", 3},   {"%ntid.y", 4},    {"%ntid.z", 5},
    {"%ctaid.x", 6}, {"%ctaid.y", 7}, {"%ctaid.z", 8}, {"%nctaid.x", 9}, {"%nctaid.y", 10}, {"%nctaid.z", 11},
};

[[noreturn]] void refuse(const std::string &what) { throw std::runtime_error(what); }

std::string trimmed(const std::string &text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

std::vector<std::string> split(const std::string &text, const std::string &by) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t at; (at = text.find_first_of(by, begin)) != std::string::npos; begin = at + 1) {
    parts.push_back(trimmed(text.substr(begin, at - begin)));
  }
  parts.push_back(trimmed(text.substr(begin)));
  return parts;
}

// "u64" -> 8
size_t bytes_of(const std::string &type) {
  static const std::regex form("[usb](8|16|32|64)");
  std::smatch found;
  if (!std::regex_match(type, found, form)) refuse("type " + type);
  return std::stoul(found[1]) / 8;
}

class Body {
 public:
  Body(Kernel *kernel, std::map<std::string, size_t> parameters)
      : kernel_(kernel), parameters_(std::move(parameters)) {}

  void add(std::string statement) {
    static const std::regex label("^([A-Za-z_$][A-Za-z0-9_$]*)\\s*:");
    std::smatch found;
    while (std::regex_search(statement, found, label)) {
      labels_[found[1]] = kernel_->code.size();
      statement = trimmed(found.suffix());
    }
    if (statement.empty()) return;
    if (statement.rfind(".reg", 0) == 0) return declare(statement);
    kernel_->code.push_back(instruction(statement));
  }

  void finish() {
    for (const auto &[at, name] : branches_) {
      if (labels_.count(name) == 0) refuse("label " + name);
      kernel_->code[at].target = labels_[name];
    }
    kernel_->registers = registers_.size();
  }

 private:
  // .reg .b32 %r<40>;
  void declare(const std::string &statement) {
    static const std::regex form("\\.reg\\s+\\.(pred|[usb](?:8|16|32|64))\\s+(%[a-z]+)<([0-9]+)>");
    std::smatch found;
    if (!std::regex_match(statement, found, form)) refuse(statement);
    for (unsigned long i = 0; i < std::stoul(found[3]); ++i) {
      registers_.emplace(found[2].str() + std::to_string(i), registers_.size());
    }
  }

  Instruction instruction(std::string text) {
    Instruction one;
    if (text[0] == '@') {
      const size_t space = text.find_first_of(" \t");
      one.guard_negated = text[1] == '!';
      one.guard =
          static_cast<int>(register_of(text.substr(one.guard_negated ? 2 : 1, space - (one.guard_negated ? 2 : 1))));
      text = trimmed(text.substr(space));
    }
    const size_t space = text.find_first_of(" \t");
    const std::vector<std::string> words = split(text.substr(0, space), ".");
    const std::string rest = space == std::string::npos ? "" : trimmed(text.substr(space));
    const auto op = kOps.find(words[0]);
    if (op == kOps.end()) refuse("instruction " + words[0]);
    one.op = op->second;
    if (one.op == Op::kReturn) return one;
    if (one.op == Op::kBranch) {
      branches_.emplace_back(kernel_->code.size(), rest);
      return one;
    }
    modify(words, &one);
    for (const std::string &name : split(without_braces(rest), ",")) one.operands.push_back(operand(name));
    return one;
  }

  static void modify(const std::vector<std::string> &words, Instruction *one) {
    static const std::string known = " global cs ca cg lo to wide v2 v4 ";
    for (size_t i = 1; i < words.size(); ++i) {
      const std::string &word = words[i];
      if (word == "param") {
        one->op = Op::kLoadParameter;
      } else if (one->op == Op::kSetIf && i == 1) {
        one->compare = word;
      } else if (word == "wide") {
        one->wide = true;
      } else if (known.find(" " + word + " ") == std::string::npos) {
        // Of a conversion the last type is that of what is converted.
        one->nbytes = bytes_of(word);
      }
    }
  }

  static std::string without_braces(std::string text) {
    for (char &c : text) {
      if (c == '{' || c == '}' || c == '[' || c == ']') c = ' ';
    }
    return text;
  }

  Operand operand(const std::string &text) {
    Operand one;
    const size_t plus = text.find('+');
    const std::string name = trimmed(text.substr(0, plus));
    if (plus != std::string::npos) one.value = number(trimmed(text.substr(plus + 1)));
    if (const auto special = kSpecials.find(name); special != kSpecials.end()) {
      one.kind = Operand::Kind::kSpecial;
      one.index = special->second;
    } else if (name[0] == '%') {
      one.kind = Operand::Kind::kRegister;
      one.index = register_of(name);
    } else if (const auto parameter = parameters_.find(name); parameter != parameters_.end()) {
      one.kind = Operand::Kind::kParameter;
      one.index = parameter->second;
    } else {
      one.value = number(name);
    }
    return one;
  }

  static uint64_t number(const std::string &text) {
    char *end;
    const long long value = std::strtoll(text.c_str(), &end, 0);
    if (text.empty() || *end != '\0') refuse("operand " + text);
    return static_cast<uint64_t>(value);
  }

  size_t register_of(const std::string &name) {
    const auto found = registers_.find(name);
    if (found == registers_.end()) refuse("register " + name);
    return found->second;
  }

  Kernel *kernel_;
  std::map<std::string, size_t> parameters_, registers_, labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
};

Kernel parse_entry(const std::string &header, const std::string &body) {
  Kernel kernel;
  std::map<std::string, size_t> parameters;
  static const std::regex form("\\.param\\s+\\.(\\w+)\\s+(\\w+)");
  for (std::sregex_iterator at(header.begin(), header.end(), form), end; at != end; ++at) {
    const size_t nbytes = bytes_of((*at)[1]);
    kernel.parameter_bytes = round_up(kernel.parameter_bytes, nbytes);
    parameters[(*at)[2]] = kernel.parameter_bytes;
    kernel.parameters.push_back(nbytes);
    kernel.parameter_offsets.push_back(kernel.parameter_bytes);
    kernel.parameter_bytes += nbytes;
  }
  Body out(&kernel, std::move(parameters));
  for (const std::string &statement : split(body, ";")) out.add(statement);
  out.finish();
  return kernel;
}

}  // namespace

bool parse_ptx(const std::string &given, std::map<std::string, Kernel> *out, std::string *why) {
  static const std::regex comment("//[^\n]*"), entry("\\.entry\\s+(\\w+)\\s*\\(([^)]*)\\)\\s*");
  const std::string text = std::regex_replace(given, comment, "");
  for (const char *const needed : {".version", ".target sm_", ".address_size 64"}) {
    if (text.find(needed) != std::string::npos) continue;
    *why = std::string("no ") + needed;
    return false;
  }
  try {
    for (std::sregex_iterator at(text.begin(), text.end(), entry), end; at != end; ++at) {
      const auto begin = static_cast<size_t>(at->position() + at->length());
      // The braces of vectors are inside those of the body, which ends at the first one on a line of its own.
      const size_t last = text.find("\n}", begin);
      if (text[begin] != '{' || last == std::string::npos) refuse("body of " + (*at)[1].str());
      (*out)[(*at)[1]] = parse_entry((*at)[2], text.substr(begin + 1, last - begin));
    }
  } catch (const std::exception &error) {
    *why = error.what();
    return false;
  }
  if (!out->empty()) return true;
  *why = "no .entry";
  return false;
}

}  // namespace fake
