// Rows of codes with a scale each, in and out.
#pragma once

#include "blis/layout.h"
#include "codec/int8/rows.h"

namespace ktk::blis {
namespace {

// Where row n of codes goes, and its scale.
inline int8_t* target_row(const ktk_export* target, size_t n) {
  return static_cast<int8_t*>(target->data) + n * target->data_stride;
}
inline void export_scale(const ktk_export* target, size_t n, float scale) {
  char* at = static_cast<char*>(target->scale) + n * target->scale_stride;
  *reinterpret_cast<float*>(at) = scale;
}
// Zeros behind the last scale, up to the end of the packed matrix.
inline void end_scales(const ktk_matrix* matrix, float* scale) {
  const size_t end = round_up(matrix->n * sizeof(float), KTK_ALIGNMENT) / sizeof(float);
  for (size_t n = matrix->n; n < end; ++n) scale[n] = 0;
}

}  // namespace
}  // namespace ktk::blis
