// Plain Armv8-A: products of bytes as words, two of them added there and pairs of words then added
// to int32 sums. Codes of activations are at most 127 in size and those of weights 128, so that two
// products are 32512 at most and fit.
//
//   sum of a column:   k 0 1 8 9 | k 2 3 10 11 | k 4 5 12 13 | k 6 7 14 15
//
// 2 rows x 8 columns take 16 registers of sums.
#include "kml/variant.h"

namespace ktk::kml {
namespace {

template <size_t kRows>
struct Sums {
  int32x4_t v[kRows][8];

  Sums() {
#pragma GCC unroll 2
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (size_t j = 0; j < 8; ++j) v[i][j] = vdupq_n_s32(0);
    }
  }

  void add(const int8_t* line, const int8_t* const (&rows)[kRows], size_t k) {
    // Eight k of a row twice, so that they meet either half of a register of weights.
    int8x16_t first[kRows], second[kRows];
#pragma GCC unroll 2
    for (size_t i = 0; i < kRows; ++i) {
      const int64x2_t both = vreinterpretq_s64_s8(vld1q_s8(rows[i] + k));
      first[i] = vreinterpretq_s8_s64(vdupq_laneq_s64(both, 0));
      second[i] = vreinterpretq_s8_s64(vdupq_laneq_s64(both, 1));
    }
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      keep_order();
      const int8x16_t w0 = vld1q_s8(line + 16 * j), w1 = vld1q_s8(line + kLineBytes + 16 * j);
#pragma GCC unroll 2
      for (size_t i = 0; i < kRows; ++i) {
        int16x8_t even = vmull_s8(vget_low_s8(w0), vget_low_s8(first[i]));
        even = vmlal_s8(even, vget_low_s8(w1), vget_low_s8(second[i]));
        int16x8_t odd = vmull_high_s8(w0, first[i]);
        odd = vmlal_high_s8(odd, w1, second[i]);
        v[i][2 * j] = vpadalq_s16(v[i][2 * j], even);
        v[i][2 * j + 1] = vpadalq_s16(v[i][2 * j + 1], odd);
      }
    }
  }

  int32x4_t total(size_t row, size_t half) const {
    const int32x4_t* column = v[row] + 4 * half;
    return vpaddq_s32(vpaddq_s32(column[0], column[1]), vpaddq_s32(column[2], column[3]));
  }
};

struct Variant {
  using Weight = WeightCodec;
  using Act = kml::Act;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_2x8_neon", gemm<Kernel<Sums, 2>>)};
};

}  // namespace
}  // namespace ktk::kml

KTK_EXPORT_VARIANT(kml, ktk::kml::Variant)
