// Rows that a function of a backend writes, with bytes between them that are nobody's.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/size.h"
#include "python/lent.h"

namespace ktk {

// `count` rows of `bytes`, each `apart` bytes behind the end of the one before. All bytes hold a
// pattern but those of rows that are written and not yet taken: a call that writes beside its own
// rows shows, even where it writes what another call has written or will write.
//
//   | row 0 | apart | row 1 | apart | ... | last row |
class SpacedRows {
 public:
  SpacedRows(const Lender& lender, const char* name, size_t count, size_t bytes, size_t apart,
             size_t align)
      : name_(name),
        count_(bytes ? count : 0),
        bytes_(bytes),
        stride_(sum(bytes, apart)),
        lent_(lender.lend(Operand::kOutput, nullptr,
                          count_ ? sum(product(count_ - 1, stride_), bytes) : 0, align)) {
    std::fill_n(lent_.data(), lent_.size(), kUnwritten);
  }

  // NULL where rows have no bytes.
  char* data() const { return count_ ? lent_.data() : nullptr; }
  size_t stride() const { return stride_; }

  // Copies rows [begin, end) to rows of `out` that touch; nobody has written them then. Throws
  // std::runtime_error, which begins with `who`, where other bytes were written.
  void take(const std::string& who, size_t begin, size_t end, char* out) const {
    if (count_ == 0) return;
    lent_.check(who);
    for (size_t row = 0; row < count_; ++row) {
      char* const at = lent_.data() + row * stride_;
      const bool taken = begin <= row && row < end;
      const char* const others = taken ? at + bytes_ : at;
      const char* const next = row + 1 < count_ ? at + stride_ : at + bytes_;
      if (!std::all_of(others, next, [](char byte) { return byte == kUnwritten; })) {
        throw std::runtime_error(who + " wrote " + (taken ? "behind" : "to or behind") + " row " +
                                 std::to_string(row) + " of " + name_ + ", asked for rows [" +
                                 std::to_string(begin) + ", " + std::to_string(end) + ")");
      }
      if (!taken) continue;
      std::memcpy(out + (row - begin) * bytes_, at, bytes_);
      std::fill_n(at, bytes_, kUnwritten);
    }
  }

 private:
  // A NaN in every float, so that reading what nobody wrote shows.
  static constexpr char kUnwritten = '\xff';

  const char* name_;
  size_t count_, bytes_, stride_;
  Lent lent_;
};

}  // namespace ktk
