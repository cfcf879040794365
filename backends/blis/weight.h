// Rows of codes with a scale each, in and out.
#pragma once

#include "blis/layout.h"
#include "common/int8_rows.h"

namespace ktk::blis {
namespace {

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
