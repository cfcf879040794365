// What a format means for a matrix of a size.
#pragma once

#include <cstddef>
#include <string>

#include "ktk/abi.h"

namespace ktk {

// Whether groups mean anything: without scales and zero points they do not.
inline bool has_groups(const ktk_format& format) {
  return format.scale != KTK_NONE || format.zero != KTK_NONE;
}

// Whether two formats mean the same bytes for a matrix of n x k.
bool same_format(const ktk_format& a, const ktk_format& b, size_t n, size_t k);

// The dense arrays of an n x k matrix as checkpoints give it: n rows of elements, and a row of
// scales and one of zero points for each of `groups_n` groups of rows. Bytes are those of one row,
// and 0 where the format has no such array.
struct SourceShape {
  size_t groups_n, groups_k;
  size_t data_bytes, scale_bytes, zero_bytes;
};
SourceShape source_shape(const ktk_format& format, size_t n, size_t k);

// "i8 with f32 scales per 1 x 128", for messages.
std::string describe(const ktk_format& format);

}  // namespace ktk
