// Rows of floats as they come from a caller.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>

#include "format/elements.h"

namespace ktk {

// Rows of `type` in memory, `stride` elements apart.
struct Rows {
  void* data = nullptr;
  ktk_element type = KTK_F32;
  size_t stride = 0;

  size_t bytes_of(size_t columns) const { return block_of(type).bytes_of(columns); }
  char* at(size_t row, size_t column = 0) const {
    return static_cast<char*>(data) + bytes_of(row * stride + column);
  }
  // Makes the first `columns` of rows [begin, end) zeros.
  void clear(size_t begin, size_t end, size_t columns) const {
    for (size_t row = begin; row < end; ++row) std::memset(at(row), 0, bytes_of(columns));
  }
};

// Whether some byte between the first and the last of either may be one of both.
inline bool overlap(const Rows& a, size_t a_columns, const Rows& b, size_t b_columns, size_t rows) {
  if (rows == 0) return false;
  const std::less<const char*> before;
  return before(a.at(0), b.at(rows - 1, b_columns)) && before(b.at(0), a.at(rows - 1, a_columns));
}

}  // namespace ktk
