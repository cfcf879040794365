// Products without VNNI: vpmaddubsw adds two of them to a word, which cannot saturate with codes of
// four bits (2 * 15 * 127 = 3810). Eight such words can be added before they must become dwords
// (30480 < 32768), which is a depth of 32: the unit of these instruction sets, whatever the groups.
#pragma once

#include <stddef.h>

#if defined(__AVX512BW__)
#include "simd/zmm.h"
#else
#include "simd/ymm.h"
#endif

namespace ktk::int4 {
namespace {

constexpr size_t kWordsDepth = 32;

#if defined(__AVX512BW__)
struct Words512 : Zmm {
  static constexpr bool kSumsWords = true;
  static Int dot(Int acc, Int weight, const uint8_t* act) {
    const Int pairs = _mm512_maddubs_epi16(weight, broadcast(act));
    // acc + pairs, but gcc 12 moves and spills accumulators that it may put elsewhere.
    asm("vpaddw %1, %0, %0" : "+v"(acc) : "v"(pairs));
    return acc;
  }
  static Int finish(Int acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
};
#else
struct Words256 : Ymm {
  static constexpr bool kSumsWords = true;
  static Int dot(Int acc, Int weight, const uint8_t* act) {
    const Int pairs = _mm256_maddubs_epi16(weight, broadcast(act));
    // acc + pairs, but gcc 12 moves and spills accumulators that it may put elsewhere.
    asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(pairs));
    return acc;
  }
  static Int finish(Int acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
};
#endif

}  // namespace
}  // namespace ktk::int4
