// One step of rows to the packed layout: transposes of 4 x 4 pairs of bf16.
#pragma once

#include "bf16/layout.h"
#include "simd/bf16.h"

namespace ktk::bf16 {
namespace {

// Eight consecutive elements of a row as four pairs of bf16.
template <ktk_element kElement>
inline uint32x4_t load_pairs(const char* row) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(row);
  const float* values = reinterpret_cast<const float*>(row);
  if constexpr (kElement == KTK_BF16) {
    return vreinterpretq_u32_u16(vld1q_u16(halves));
  } else if constexpr (kElement == KTK_F16) {
    const float16x8_t eight = vreinterpretq_f16_u16(vld1q_u16(halves));
    return vreinterpretq_u32_u16(vcombine_u16(bf16_from_f32(vcvt_f32_f16(vget_low_f16(eight))),
                                              bf16_from_f32(vcvt_high_f32_f16(eight))));
  } else {
    return vreinterpretq_u32_u16(
        vcombine_u16(bf16_from_f32(vld1q_f32(values)), bf16_from_f32(vld1q_f32(values + 4))));
  }
}

// Four rows of eight elements become quarters of four rows of a tile (pairs x columns).
template <ktk_element kElement>
inline void transpose_pairs(const char* rows, size_t stride, char* tile_row) {
  uint32x4_t v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = load_pairs<kElement>(rows + i * stride);
  const auto wide = [](uint32x4_t x) { return vreinterpretq_u64_u32(x); };
  const uint64x2_t low[2] = {wide(vtrn1q_u32(v[0], v[1])), wide(vtrn1q_u32(v[2], v[3]))};
  const uint64x2_t high[2] = {wide(vtrn2q_u32(v[0], v[1])), wide(vtrn2q_u32(v[2], v[3]))};
  const uint64x2_t out[4] = {vzip1q_u64(low[0], low[1]), vzip1q_u64(high[0], high[1]),
                             vzip2q_u64(low[0], low[1]), vzip2q_u64(high[0], high[1])};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    vst1q_u64(reinterpret_cast<uint64_t*>(tile_row + i * kLine), out[i]);
  }
}

// One full step of 32 rows x 32 elements.
template <ktk_element kElement>
inline void pack_step(const char* rows, size_t stride, char* step) {
  constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;
  for (size_t col = 0; col < kNr; col += 4) {
    char* out = step + col / kTileCols * kTileBytes + col % kTileCols * 4;
    for (size_t pair = 0; pair < kPairs; pair += 4) {
      transpose_pairs<kElement>(rows + col * stride + pair * 2 * kBytes, stride,
                                out + pair * kLine);
    }
  }
}

// One full step to 32 rows x 32 elements.
inline void unpack_step(const char* step, float* rows, size_t stride) {
  for (size_t col = 0; col < kNr; ++col) {
    const char* pairs = step + col / kTileCols * kTileBytes + col % kTileCols * 4;
    for (size_t i = 0; i < kPairs; ++i) {
      uint32_t pair;
      memcpy(&pair, pairs + i * kLine, sizeof pair);
      rows[col * stride + 2 * i] = __builtin_bit_cast(float, pair << 16);
      rows[col * stride + 2 * i + 1] = __builtin_bit_cast(float, pair & 0xffff0000);
    }
  }
}

}  // namespace
}  // namespace ktk::bf16
