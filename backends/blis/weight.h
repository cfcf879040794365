// Weights of any accepted format as rows of codes with a scale each.
#pragma once

#include "blis/layout.h"
#include "common/int8_rows.h"

namespace ktk::blis {
namespace {

// Calls pack(rows) with what reads the source.
template <class Pack>
inline void with_rows(const ktk_matrix* matrix, const ktk_source* source, Pack pack) {
  switch (source->format.element) {
    case KTK_F32:
      return pack(FloatRows<ElementF32, kColumns, kCodes>(source, matrix->k));
    case KTK_F16:
      return pack(FloatRows<ElementF16, kColumns, kCodes>(source, matrix->k));
    case KTK_BF16:
      return pack(FloatRows<ElementBf16, kColumns, kCodes>(source, matrix->k));
    default:
      return pack(ReadyRows<kCodes>(source, matrix->k));
  }
}

// Where row n of codes goes, and its scale.
inline int8_t* target_row(const ktk_target* target, size_t n) {
  return static_cast<int8_t*>(target->data) + n * target->data_stride;
}
inline void export_scale(const ktk_target* target, size_t n, float scale) {
  char* at = static_cast<char*>(target->scale) + n * target->scale_stride;
  *reinterpret_cast<float*>(at) = scale;
}

}  // namespace
}  // namespace ktk::blis
