// Arrays of any number of dimensions as rows of their last one.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/rows.h"
#include "python/array.h"

namespace ktk {

// Rows [..., columns] of floats that are read: where they lie, or in `copy` where their strides are
// not those of rows.
struct InputRows {
  // Throws TypeError or ValueError with what was expected and what came.
  InputRows(const char* name, nb::handle argument, size_t columns);
  // Of an array that was looked at before: a capsule of DLPack can be taken once.
  InputRows(const char* name, AnyArray given, size_t columns);
  InputRows(const InputRows&) = delete;
  InputRows& operator=(const InputRows&) = delete;

  AnyArray array;
  std::vector<char> copy;
  Rows rows;
  size_t count = 1;

  // The leading dimensions, and one more.
  std::vector<int64_t> shape_with(size_t last) const;
};

// Rows of floats that are written, in an array of this shape.
struct OutputRows {
  OutputRows(const char* name, nb::handle argument, const std::vector<int64_t>& shape);

  AnyOutput array;
  Rows rows;
};

// All ids of an array of any shape, int32 or int64.
struct Ids {
  Ids(const char* name, nb::handle argument);

  AnyArray array;
  std::vector<int64_t> all;

  std::vector<int64_t> shape_with(size_t last) const;
};

}  // namespace ktk
