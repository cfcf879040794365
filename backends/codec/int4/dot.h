// How an instruction set multiplies four codes of a weight, 0..15, with four of an activation and
// adds the products to a dword:
//
//   dot(acc, weight, act)   act: four codes of an activation, broadcast
//   finish(acc)             the sums, once all products are in
//
// Without VNNI vpmaddubsw adds two products to a word, which cannot saturate with codes of four
// bits (2 * 15 * 127 = 3810). Eight such words can be added before they must become dwords
// (30480 < 32768), which is a depth of 32.
//
// asm is what the intrinsic would be, but gcc 12 moves and spills accumulators that it may put
// elsewhere.
#pragma once

#include <stddef.h>

#if defined(__AVX512BW__)
#include "simd/zmm.h"
#else
#include "simd/ymm.h"
#endif

namespace ktk::int4 {
namespace {

constexpr size_t kI16Depth = 32;

// What an accumulator holds until finish().
enum class Sums { kI32, kI16 };

#if defined(__AVX512BW__)
struct Maddubs512 : Zmm {
  static constexpr Sums kSums = Sums::kI16;
  static void dot(Int& acc, Int weight, Int act) {
    const Int pairs = _mm512_maddubs_epi16(weight, act);
    asm("vpaddw %1, %0, %0" : "+v"(acc) : "v"(pairs));
  }
  static Int finish(Int acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
};
#else
struct Maddubs256 : Ymm {
  static constexpr Sums kSums = Sums::kI16;
  static void dot(Int& acc, Int weight, Int act) {
    const Int pairs = _mm256_maddubs_epi16(weight, act);
    asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(pairs));
  }
  static Int finish(Int acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
};
#endif

#if defined(__AVX512VNNI__)
struct Vnni512 : Zmm {
  static constexpr Sums kSums = Sums::kI32;
  static Int broadcast(const uint8_t* act) {
    Int four;
    asm("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const int32_t*>(act)));
    return four;
  }
  static void dot(Int& acc, Int weight, Int act) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weight), "v"(act));
  }
  static Int finish(Int acc) { return acc; }
};
#elif defined(__AVXVNNI__)
struct Vnni256 : Ymm {
  static constexpr Sums kSums = Sums::kI32;
  static void dot(Int& acc, Int weight, Int act) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weight), "x"(act));
  }
  static Int finish(Int acc) { return acc; }
};
#endif

}  // namespace
}  // namespace ktk::int4
