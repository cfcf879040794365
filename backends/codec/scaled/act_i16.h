// Activation codec: rows of f32 to int16 with a scale per 32 values, and back. For CPUs that
// multiply integers at twice the rate of f32: small codes of weights are exact in int16, their
// sums exact in int32.
//
//   one row   [codes, k padded to 64][f32 scale per 32][int32 sum of the codes per 16][zeros]
//
// scale = absmax / 32767, code = x / scale to nearest even: an error of 2^-16 of the group's
// largest value, where bf16 has 2^-9 of each. A group with NaN or Inf has the scale NaN and codes
// 0.
//
// Sums are for weights that are stored with an offset: what that adds to a product can be taken
// away at its start.
#pragma once

#include <string.h>

#include "codec/int8/quantize.h"
#include "codec/scaled/layout.h"

namespace ktk {
namespace {

struct ActI16 {
  static constexpr size_t kGroup = 32;
  static constexpr size_t kSumDepth = 16;
  static constexpr float kLevels = 32767;
  static constexpr ktk_format kFormat = {KTK_I16, KTK_F32, KTK_NONE, 1, kGroup};
  static constexpr uint32_t kKStep = kStepDepth;

  static size_t padded(const ktk_matrix* matrix) { return round_up(matrix->k, kStepDepth); }
  static size_t scale_offset(const ktk_matrix* matrix) { return padded(matrix) * sizeof(int16_t); }
  static size_t sum_offset(const ktk_matrix* matrix) {
    return scale_offset(matrix) + padded(matrix) / kGroup * sizeof(float);
  }
  // An odd number of cache lines: rows at a power of two would fall into one L1 set.
  static size_t size(const ktk_matrix* matrix) {
    return round_up(end_offset(matrix), kLine) | kLine;
  }

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    char* row = static_cast<char*>(act);
    for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
      int16_t* codes = reinterpret_cast<int16_t*>(row);
      float* scales = reinterpret_cast<float*>(row + scale_offset(matrix));
      int32_t* sums = reinterpret_cast<int32_t*>(row + sum_offset(matrix));
      if (k_end == matrix->k) {
        const size_t end = k_end / kStepDepth * kStepDepth;  // of whole steps
        memset(codes + end, 0, (padded(matrix) - end) * sizeof *codes);
        memset(scales + end / kGroup, 0, (padded(matrix) - end) / kGroup * sizeof *scales);
        memset(sums + end / kSumDepth, 0, (padded(matrix) - end) / kSumDepth * sizeof *sums);
        memset(row + end_offset(matrix), 0, size(matrix) - end_offset(matrix));
      }
      for (size_t k = k_begin; k < k_end; k += kGroup) {
        const size_t count = smaller(kGroup, k_end - k);
        scales[k / kGroup] = quantize_group(
            x + (k - k_begin), count, round_up(count, kSumDepth),
            [&](size_t j, I32x16 q) {
              sums[(k + j) / kSumDepth] = sum(q);
              store_words(codes + k + j, q);
            },
            kLevels);
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    const char* row = static_cast<const char*>(act);
    for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
      const int16_t* codes = reinterpret_cast<const int16_t*>(row);
      const float* scales = reinterpret_cast<const float*>(row + scale_offset(matrix));
      for (size_t k = 0; k < matrix->k; ++k) out[k] = codes[k] * scales[k / kGroup];
    }
  }

 private:
  static size_t end_offset(const ktk_matrix* matrix) {
    return sum_offset(matrix) + padded(matrix) / kSumDepth * sizeof(int32_t);
  }
};

}  // namespace
}  // namespace ktk
