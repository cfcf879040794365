// Rows to columns, four by four.
#pragma once

#include <immintrin.h>

namespace ktk {
namespace {

// Sixteen bytes of each of four rows become the first dwords of all four, the second, ...
__attribute__((always_inline)) inline void transpose_dwords(__m128i (&rows)[4]) {
  const __m128i ab_lo = _mm_unpacklo_epi32(rows[0], rows[1]);
  const __m128i ab_hi = _mm_unpackhi_epi32(rows[0], rows[1]);
  const __m128i cd_lo = _mm_unpacklo_epi32(rows[2], rows[3]);
  const __m128i cd_hi = _mm_unpackhi_epi32(rows[2], rows[3]);
  rows[0] = _mm_unpacklo_epi64(ab_lo, cd_lo);
  rows[1] = _mm_unpackhi_epi64(ab_lo, cd_lo);
  rows[2] = _mm_unpacklo_epi64(ab_hi, cd_hi);
  rows[3] = _mm_unpackhi_epi64(ab_hi, cd_hi);
}

}  // namespace
}  // namespace ktk
