// What the functions of a backend are handed in place of the caller's memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/guarded.h"
#include "core/memory.h"
#include "core/size.h"

namespace ktk {

// Memory that the functions of a backend are handed.
enum class Operand { kNone, kWeight, kAct, kDst, kScratch, kInput, kOutput };
constexpr const char* kOperands[] = {"", "weight", "act", "dst", "scratch", "input", "output"};

// The caller's bytes in memory of our own, which somebody may overrun: either it is guarded, or has
// a page to spare on either side, so that whoever does not look for overruns is not disturbed. Then
// it starts on an odd multiple of `align`: who counts on more than is promised is found out.
class Lent {
 public:
  // `from` may be NULL: nothing was written yet.
  Lent(const void* from, size_t bytes, size_t align, bool guarded) : bytes_(bytes) {
    if (guarded) {
      guarded_.emplace(bytes, align);
    } else {
      plain_ = Memory(sum(bytes, 2 * kSpare + align));
      start_ = kSpare + align;
    }
    if (from) std::memcpy(data(), from, bytes);
  }

  char* data() const { return guarded_ ? guarded_->data() : plain_.data() + start_; }
  size_t size() const { return bytes_; }
  void check(const std::string& who) const {
    if (guarded_) guarded_->check(who);
  }
  void copy_to(void* to) const { std::memcpy(to, data(), bytes_); }

 private:
  static constexpr size_t kSpare = 4096;

  size_t bytes_, start_ = 0;
  std::optional<Guarded> guarded_;
  Memory plain_;
};

// Lends memory, that of one operand between guards.
class Lender {
 public:
  // `guard` is one of kOperands. Throws std::invalid_argument.
  explicit Lender(const std::string& guard) {
    const auto found = std::find(std::begin(kOperands), std::end(kOperands), guard);
    if (found == std::end(kOperands)) throw std::invalid_argument("no operand is called " + guard);
    guarded_ = static_cast<Operand>(found - std::begin(kOperands));
  }

  bool guards(Operand operand) const { return guarded_ == operand; }

  Lent lend(Operand operand, const void* from, size_t bytes, size_t align) const {
    return Lent(from, bytes, align, guards(operand));
  }

  // The `bytes` at `data`, which a function only reads: they stay where they are unless guarded.
  const void* input(const void* data, size_t bytes, std::vector<Guarded>& keep) const {
    if (guarded_ != Operand::kInput || !data) return data;
    keep.emplace_back(bytes, 1);
    return std::memcpy(keep.back().data(), data, bytes);
  }

 private:
  Operand guarded_;
};

}  // namespace ktk
