// Where the next act values of the rows of a tile are.
#pragma once

#include <stddef.h>

namespace ktk {
namespace {

// Pointers three rows apart; the stride times 0, 1, 2 is left to addressing modes, so that 12 rows
// take five registers.
template <size_t kM>
struct RowPointers {
  static constexpr size_t kCount = (kM + 2) / 3;
  const char* third[kCount];
  size_t stride;

  RowPointers(const char* act, size_t act_stride) : stride(act_stride) {
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i) third[i] = act + 3 * i * stride;
  }
  const char* row(size_t i) const { return third[i / 3] + i % 3 * stride; }
  void advance(ptrdiff_t bytes) {
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i) third[i] += bytes;
  }
};

}  // namespace
}  // namespace ktk
