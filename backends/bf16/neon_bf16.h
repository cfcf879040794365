// BF16 with bfmmla: bf16 rows; 2 rows x 2 columns x 4 k in an instruction. Its operand of weights
// is two columns of four k, which two lines of the layout have in the same quarter of each:
//
//   line of k 0 1:   c0 | c1 | c2 | c3        zip1:   c0 k 0 1 | c0 k 2 3 | c1 k 0 1 | c1 k 2 3
//   line of k 2 3:   c0 | c1 | c2 | c3        zip2:   c2 k 0 1 | c2 k 2 3 | c3 k 0 1 | c3 k 2 3
//
//   a sum:   row 0 column 0 | row 0 column 1 | row 1 column 0 | row 1 column 1
//
// 4 rows x 16 columns are 16 sums. An odd last row is multiplied twice, and one of the results
// dropped, so that a row sees the same instructions in any batch.
#pragma once

#include "bf16/neon_tile.h"

namespace ktk::bf16 {
namespace {

template <size_t kRows, size_t kTiles>
struct SumsBf16 {
  static constexpr size_t kActBytes = 2;
  static constexpr size_t kLineProducts = 2;
  static constexpr size_t kPairs = (kRows + 1) / 2;
  float32x4_t v[kPairs][8 * kTiles];

  // The other row of a pair; the last one may be its own.
  static constexpr size_t odd_row(size_t i) { return 2 * i + 1 < kRows ? 2 * i + 1 : 2 * i; }

  void zero() {
#pragma GCC unroll 2
    for (size_t i = 0; i < kPairs; ++i) {
#pragma GCC unroll 16
      for (size_t j = 0; j < 8 * kTiles; ++j) v[i][j] = vdupq_n_f32(0);
    }
  }
  void load(const float* dst, size_t stride) {
#pragma GCC unroll 2
    for (size_t i = 0; i < kPairs; ++i) {
#pragma GCC unroll 16
      for (size_t j = 0; j < 8 * kTiles; ++j) {
        v[i][j] = vcombine_f32(vld1_f32(dst + 2 * i * stride + 2 * j),
                               vld1_f32(dst + odd_row(i) * stride + 2 * j));
      }
    }
  }
  void store(float* dst, size_t stride) const {
#pragma GCC unroll 2
    for (size_t i = 0; i < kPairs; ++i) {
#pragma GCC unroll 16
      for (size_t j = 0; j < 8 * kTiles; ++j) {
        vst1_f32(dst + odd_row(i) * stride + 2 * j, vget_high_f32(v[i][j]));
        vst1_f32(dst + 2 * i * stride + 2 * j, vget_low_f32(v[i][j]));
      }
    }
  }

  void add(size_t tile, const char* weight, const char* const (&rows)[kRows], size_t offset) {
    bfloat16x8_t act[kPairs];
#pragma GCC unroll 2
    for (size_t i = 0; i < kPairs; ++i) {
      act[i] = vcombine_bf16(four(rows[2 * i] + offset), four(rows[odd_row(i)] + offset));
    }
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      keep_order();
      const uint32x4_t first = quarter(weight + 16 * j), second = quarter(weight + kLine + 16 * j);
      const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
      const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 2
      for (size_t i = 0; i < kPairs; ++i) {
        float32x4_t* sums = v[i] + 8 * tile + 2 * j;
        sums[0] = vbfmmlaq_f32(sums[0], act[i], low);
        sums[1] = vbfmmlaq_f32(sums[1], act[i], high);
      }
    }
  }

 private:
  static bfloat16x4_t four(const char* act) {
    return vreinterpret_bf16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(act)));
  }
  static uint32x4_t quarter(const char* line) {
    return vld1q_u32(reinterpret_cast<const uint32_t*>(line));
  }
};

}  // namespace
}  // namespace ktk::bf16
