// BF16 with plain Armv8-A: f32 rows. A quarter of a line holds pairs (k, k+1) of 4 columns. A shift
// makes f32 of the even k, a mask of the odd ones; each is multiplied with one of four act values
// of a row.
//
//   row 0:   v[0][0]   v[0][1]   v[0][2]   v[0][3]      4 columns each
//   ...
//   row 3:   v[3][0]   v[3][1]   v[3][2]   v[3][3]      16 sums, 4 rows of act, 2 weights, mask
#pragma once

#include "bf16/neon_tile.h"

namespace ktk::bf16 {
namespace {

template <size_t kRows, size_t kTiles>
struct SumsF32 {
  static constexpr size_t kActBytes = sizeof(float);
  static constexpr size_t kLineProducts = 2;
  float32x4_t v[kRows][4 * kTiles];

  void zero() {
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (size_t j = 0; j < 4 * kTiles; ++j) v[i][j] = vdupq_n_f32(0);
    }
  }
  void load(const float* dst, size_t stride) {
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (size_t j = 0; j < 4 * kTiles; ++j) v[i][j] = vld1q_f32(dst + i * stride + 4 * j);
    }
  }
  void store(float* dst, size_t stride) const {
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (size_t j = 0; j < 4 * kTiles; ++j) vst1q_f32(dst + i * stride + 4 * j, v[i][j]);
    }
  }

  void add(size_t tile, const char* weight, const char* const (&rows)[kRows], size_t offset) {
    float32x4_t act[kRows];
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
      act[i] = vld1q_f32(reinterpret_cast<const float*>(rows[i] + offset));
    }
    add_line<0>(tile, weight, act);
    add_line<2>(tile, weight + kLine, act);
  }

 private:
  template <int kLane>
  void add_line(size_t tile, const char* line, const float32x4_t (&act)[kRows]) {
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
      keep_order();
      const uint32x4_t pairs = vld1q_u32(reinterpret_cast<const uint32_t*>(line + 16 * j));
      const float32x4_t even = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
      const float32x4_t odd = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
#pragma GCC unroll 4
      for (size_t i = 0; i < kRows; ++i) {
        float32x4_t& sum = v[i][4 * tile + j];
        sum = vfmaq_laneq_f32(sum, even, act[i], kLane);
        sum = vfmaq_laneq_f32(sum, odd, act[i], kLane + 1);
      }
    }
  }
};

}  // namespace
}  // namespace ktk::bf16
