// What both variants do with the product of one group: from integers to f32, group after group.
#pragma once

#include "blis/act.h"

namespace ktk::blis {
namespace {

// Columns [n, n + columns) of one group of a product, as `c`, m rows of kNr integers (in int32
// or float). dst = c * act scale, and after the last group times the weight scale.
template <class Integer>
inline void add_group(const ktk_matmul* mm, size_t n, size_t columns, size_t group,
                      const Integer* c, const float* weight_scale) {
  const uint8_t* act = static_cast<const uint8_t*>(mm->act) + Act::scale_offset(mm->matrix);
  const bool last = group + 1 == num_groups(mm->matrix);
  for (size_t row = 0; row < mm->m; ++row, c += kNr) {
    const float scale = reinterpret_cast<const float*>(act + row * mm->act_stride)[group];
    float* dst = mm->dst + row * mm->dst_stride + (n - mm->n_begin);
    if (group == 0) {
      for (size_t j = 0; j < columns; ++j) dst[j] = static_cast<float>(c[j]) * scale;
    } else {
      for (size_t j = 0; j < columns; ++j) {
        dst[j] = __builtin_fmaf(static_cast<float>(c[j]), scale, dst[j]);
      }
    }
    if (!last) continue;
    for (size_t j = 0; j < columns; ++j) dst[j] *= weight_scale[n + j];
  }
}

}  // namespace
}  // namespace ktk::blis
