// How activations are kept: codec/int8/act.h, for weights that are stored as q + 128.
#pragma once

#include "amxint8/layout.h"
#include "codec/int8/act.h"

namespace ktk::amxint8 {
namespace {

// Codes as words for vpmaddwd, which meets the even and the odd bytes of a weight dword one after
// the other: k0 k2 | k1 k3.
struct WordCodes {
  static constexpr size_t kBytes = 2;
  static void store(uint8_t* row, size_t k, I32x16 codes) {
    const __m128i q = narrow(codes);
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(q, 8), 8);
    const __m128i odd = _mm_srai_epi16(q, 8);
    __m128i* to = reinterpret_cast<__m128i*>(row + 2 * k);
    _mm_storeu_si128(to, _mm_unpacklo_epi32(even, odd));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(even, odd));
  }
  static __m128i load(const uint8_t* row, size_t k) {
    const __m128i* from = reinterpret_cast<const __m128i*>(row + 2 * k);
    const __m128i order = _mm_setr_epi8(0, 4, 2, 6, 8, 12, 10, 14, 0, 4, 2, 6, 8, 12, 10, 14);
    const __m128i lo = _mm_shuffle_epi8(_mm_loadu_si128(from), order);
    const __m128i hi = _mm_shuffle_epi8(_mm_loadu_si128(from + 1), order);
    return _mm_unpacklo_epi64(lo, hi);
  }
};

template <size_t kGroup>
using ActBytes = ActInt8<kGroup, kStepDepth, WeightOffset::k128>;
template <size_t kGroup>
using ActWords = ActInt8<kGroup, kStepDepth, WeightOffset::k128, WordCodes>;

}  // namespace
}  // namespace ktk::amxint8
