// Rows of int8 with a scale per 256 values (codec/int8/act.h); k is padded to 16.
#pragma once

#include "codec/int8/act.h"
#include "kml/layout.h"

namespace ktk::kml {
namespace {

using Act = ActInt8<256, kDepth>;

inline const float* act_scale(const ktk_matrix* matrix, const char* row) {
  return reinterpret_cast<const float*>(row + Act::scale_offset(matrix));
}

}  // namespace
}  // namespace ktk::kml
