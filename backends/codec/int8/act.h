// Activation codec: rows of f32 to int8 with a scale per group of kGroup values, and back.
//
//   one row   [codes, k padded to kPad][f32 scale per group][int32 comp per group][zeros]
//
// scale = absmax / 127, code = x / scale to nearest even. A group with NaN or Inf has the scale NaN
// and codes 0.
//
// Weights that are stored as q + 128 make every product too large by 128 * (sum of the codes):
// comp = -128 * sum is where the sum of the group starts, and the repair costs nothing per weight.
// Exact: all in int32. Where weights have no such offset, rows have no comp.
//
// Rows are an odd number of cache lines long: 16 rows at a power of two would fall into one L1 set.
#pragma once

#include <string.h>

#include "codec/int8/quantize.h"
#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk {
namespace {

// Codes as bytes, in the order of k.
struct ByteCodes {
  static constexpr size_t kBytes = 1;
  static void store(uint8_t* row, size_t k, I32x16 codes) { store_bytes(row + k, narrow(codes)); }
  static auto load(const uint8_t* row, size_t k) { return load_bytes(row + k); }
};

enum class WeightOffset { kNone = 0, k128 = 128 };

template <size_t kGroupDepth, size_t kPad, WeightOffset kOffset = WeightOffset::kNone,
          class Codes = ByteCodes>
struct ActInt8 {
  static_assert(kGroupDepth % kPad == 0 && kPad % 16 == 0);
  static constexpr size_t kGroup = kGroupDepth;
  static constexpr size_t kCodeBytes = Codes::kBytes;
  static constexpr bool kHasComp = kOffset != WeightOffset::kNone;
  static constexpr ktk_format kFormat = {KTK_I8, KTK_F32, KTK_NONE, 1, kGroup};
  static constexpr uint32_t kKStep = kGroup;  // so that each group is quantized as a whole

  static size_t num_groups(const ktk_matrix* matrix) { return ceil_div(matrix->k, kGroup); }
  // Of a group, which the end of the row may cut short.
  static size_t depth(const ktk_matrix* matrix, size_t group) {
    return smaller(kGroup, matrix->k - group * kGroup);
  }
  static size_t scale_offset(const ktk_matrix* matrix) {
    return round_up(matrix->k, kPad) * kCodeBytes;
  }
  static size_t comp_offset(const ktk_matrix* matrix) {
    return scale_offset(matrix) + num_groups(matrix) * sizeof(float);
  }
  static size_t size(const ktk_matrix* matrix) {
    return round_up(end_offset(matrix), kLine) | kLine;
  }

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    uint8_t* row = static_cast<uint8_t*>(act);
    for (size_t i = 0; i < m; ++i, x += x_stride, row += act_stride) {
      float* scale = reinterpret_cast<float*>(row + scale_offset(matrix));
      int32_t* comp = reinterpret_cast<int32_t*>(row + comp_offset(matrix));
      for (size_t k = k_begin; k < k_end; k += kGroup) {
        const size_t count = smaller(kGroup, k_end - k);
        I32x16 sums = zero_i32();
        scale[k / kGroup] = quantize_group(x + (k - k_begin), count, round_up(count, kPad),
                                           [&](size_t j, I32x16 q) {
                                             if constexpr (kHasComp) sums = add(sums, q);
                                             Codes::store(row, k + j, q);
                                           });
        if constexpr (kHasComp) comp[k / kGroup] = -static_cast<int32_t>(kOffset) * sum(sums);
      }
      if (k_end == matrix->k) {
        memset(row + end_offset(matrix), 0, size(matrix) - end_offset(matrix));
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    const uint8_t* row = static_cast<const uint8_t*>(act);
    for (size_t i = 0; i < m; ++i, row += act_stride, out += out_stride) {
      const float* scale = reinterpret_cast<const float*>(row + scale_offset(matrix));
      for (size_t k = 0; k < matrix->k; k += 16) {
        float values[16];
        store_product(values, Codes::load(row, k), scale[k / kGroup]);
        memcpy(out + k, values, smaller(16, matrix->k - k) * sizeof *out);
      }
    }
  }

 private:
  static size_t end_offset(const ktk_matrix* matrix) {
    return comp_offset(matrix) + (kHasComp ? num_groups(matrix) * sizeof(int32_t) : 0);
  }
};

}  // namespace
}  // namespace ktk
