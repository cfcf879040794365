// smmla: 2 rows x 2 columns x 8 k in an instruction.
//
//               w0: columns 0 1   w1: 2 3        w2: 4 5        w3: 6 7
//   rows 0 1:   v[0][0]           v[0][1]        v[0][2]        v[0][3]
//   ...
//   rows 6 7:   v[3][0]           v[3][1]        v[3][2]        v[3][3]
//
//   a sum:      row 0 column 0 | row 0 column 1 | row 1 column 0 | row 1 column 1
//
// 16 sums, 4 weights and the rows take 24 of 32 registers. Up to 4 rows have too few sums to hide
// the latency of smmla (3 to 4 cycles, two in each): they take turns between two sets, one for
// either line of a step. An odd last row is multiplied twice, and one of the results dropped.
#include "kml/variant.h"

namespace ktk::kml {
namespace {

template <size_t kRows>
struct Sums {
  static constexpr size_t kPairs = (kRows + 1) / 2;
  static constexpr size_t kSets = kPairs <= 2 ? 2 : 1;
  int32x4_t v[kSets][kPairs][4];

  Sums() {
#pragma GCC unroll 2
    for (size_t set = 0; set < kSets; ++set) {
#pragma GCC unroll 4
      for (size_t i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) v[set][i][j] = vdupq_n_s32(0);
      }
    }
  }

  void add(const int8_t* line, const int8_t* const (&rows)[kRows], size_t k) {
    int8x16_t first[kPairs], second[kPairs];
#pragma GCC unroll 4
    for (size_t i = 0; i < kPairs; ++i) {
      const int64x2_t even = vreinterpretq_s64_s8(vld1q_s8(rows[2 * i] + k));
      const int64x2_t odd =
          2 * i + 1 < kRows ? vreinterpretq_s64_s8(vld1q_s8(rows[2 * i + 1] + k)) : even;
      first[i] = vreinterpretq_s8_s64(vzip1q_s64(even, odd));
      second[i] = vreinterpretq_s8_s64(vzip2q_s64(even, odd));
    }
    multiply(v[0], line, first);
    multiply(v[kSets - 1], line + kLineBytes, second);
  }

  int32x4_t total(size_t row, size_t half) const {
    const int64x2_t low = pair(row / 2, 2 * half), high = pair(row / 2, 2 * half + 1);
    return vreinterpretq_s32_s64(row % 2 == 0 ? vzip1q_s64(low, high) : vzip2q_s64(low, high));
  }

 private:
  static void multiply(int32x4_t (&sums)[kPairs][4], const int8_t* line,
                       const int8x16_t (&act)[kPairs]) {
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      const int8x16_t w = vld1q_s8(line + 16 * j);
#pragma GCC unroll 4
      for (size_t i = 0; i < kPairs; ++i) sums[i][j] = vmmlaq_s32(sums[i][j], act[i], w);
    }
  }

  int64x2_t pair(size_t i, size_t j) const {
    const int32x4_t sum = kSets == 2 ? vaddq_s32(v[0][i][j], v[kSets - 1][i][j]) : v[0][i][j];
    return vreinterpretq_s64_s32(sum);
  }
};

struct Variant {
  using Weight = WeightCodec;
  using Act = kml::Act;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_8x8_i8mm", gemm<Kernel<Sums, 8>>)};
};

}  // namespace
}  // namespace ktk::kml

KTK_EXPORT_VARIANT(kml, ktk::kml::Variant)
