// "e2m1-n32k64": MXFP4 and NVFP4 in memory. codec/scaled/layout.h has the order of lines and
// scales.
//
//   line, 64 bytes: 16 columns, 8 deep; a dword for each column
//
//   bits    31..28  27..24  23..20  19..16  15..12  11..8   7..4    3..0
//           k7      k5      k3      k1      k6      k4      k2      k0
//
// vpermw looks up the low five bits of each word. With a table of the sixteen values, twice, one
// instruction makes the bf16 pair (k0, k1) of sixteen columns, and after a shift by four bits the
// next pair.
#pragma once

#include "codec/scaled/codec.h"

namespace ktk::mxfp4 {
namespace {

constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

struct Codes {
  static constexpr size_t kLineDepth = 8;

  static bool is_nan(const uint8_t*, size_t) { return false; }  // E2M1 has none

  // Every other nibble of `x`, from the lowest on, in a word.
  static uint32_t even_nibbles(uint32_t x) {
    x &= 0x0f0f0f0f;
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0xffff;
  }
  static uint32_t pairs(uint32_t nibbles) {
    return even_nibbles(nibbles) | even_nibbles(nibbles >> 4) << 16;
  }
  static void copy(const uint8_t* row, size_t k, size_t count, uint8_t* line, size_t col) {
    uint32_t nibbles = 0;
    memcpy(&nibbles, row + k / 2, (count + 1) / 2);
    if (count % 2) nibbles &= ~(uint32_t{0xf} << count * 4);
    nibbles = pairs(nibbles);
    memcpy(line + col * sizeof nibbles, &nibbles, sizeof nibbles);
  }
  // pairs() of each dword.
  static __m128i arrange(__m128i nibbles) {
    const __m128i low = _mm_set1_epi8(0xf), two = _mm_set1_epi16(0x1001);
    const __m128i even = _mm_maddubs_epi16(_mm_and_si128(nibbles, low), two);
    const __m128i odd = _mm_maddubs_epi16(_mm_and_si128(_mm_srli_epi16(nibbles, 4), low), two);
    const __m128i dwords = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm_shuffle_epi8(_mm_packus_epi16(even, odd), dwords);
  }
  // The inverse of even_nibbles().
  static uint32_t spread(uint32_t x) {
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
  }
  static void write(const uint8_t* line, size_t col, size_t count, uint8_t* row, size_t k) {
    uint32_t nibbles;
    memcpy(&nibbles, line + col * sizeof nibbles, sizeof nibbles);
    nibbles = spread(nibbles & 0xffff) | spread(nibbles >> 16) << 4;
    memcpy(row + k / 2, &nibbles, (count + 1) / 2);
  }
  static void write_line(const uint8_t* line, uint8_t* rows, size_t stride, size_t k) {
    for (size_t i = 0; i < kHalfCols; ++i) write(line, i, kLineDepth, rows + i * stride, k);
  }
  static float value(const uint8_t* line, size_t col, size_t i) {
    const uint8_t byte = line[col * 4 + i % 2 * 2 + i / 4];
    const uint8_t code = byte >> i / 2 % 2 * 4 & 0xf;
    return kValues[code];
  }
};

using MxCodec = ScaledCodec<Codes, MxScaleCodec>;
using NvCodec = ScaledCodec<Codes, NvScaleCodec>;

struct Formats {
  static constexpr char kLayout[] = "e2m1-n32k64";

  template <class With>
  static auto dispatch(const ktk_matrix* matrix, const With& with) {
    return matrix->format.scale == KTK_UE8M0 ? with(MxCodec()) : with(NvCodec());
  }
};

}  // namespace
}  // namespace ktk::mxfp4
