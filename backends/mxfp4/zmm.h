// MXFP4 lines in 512-bit registers.
#pragma once

#include "codec/scaled/zmm.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

// bf16 by code, twice, for vpermw. Below: the same as f32, once, for vpermps.
alignas(64) constexpr uint16_t kBf16[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,  //
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,  //
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,  //
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
};
alignas(64) constexpr float kF32[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                        -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

struct DecodeBf16 {
  using Dot = DotBf16;
  using Line = __m512i;
  static constexpr size_t kVectors = 4;
  __m512i table = _mm512_load_si512(kBf16);

  Line load(const char* line) const { return _mm512_load_si512(line); }
  __m512i vector(Line line, size_t i) const {
    // Not _mm512_srli_epi16(line, 4 * i): i is a constant only after unrolling.
    return _mm512_permutexvar_epi16((__m512i)((__v32hu)line >> (4 * i)), table);
  }
  __m512 value(__m512 sum) const { return sum; }
};

struct DecodeF32 {
  using Dot = DotF32;
  using Line = __m512i;
  static constexpr size_t kVectors = 8;
  __m512 table = _mm512_load_ps(kF32);

  Line load(const char* line) const { return _mm512_load_si512(line); }
  __m512i vector(Line line, size_t i) const {
    const __m512i index = (__m512i)((__v16su)line >> (i % 2 * 16 + i / 2 * 4));
    return _mm512_castps_si512(_mm512_permutexvar_ps(index, table));
  }
  __m512 value(__m512 sum) const { return sum; }
};

}  // namespace
}  // namespace ktk::mxfp4
