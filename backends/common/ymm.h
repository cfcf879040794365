// 256-bit registers as the integer products want them, without the product itself.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace ktk {
namespace {

struct Ymm {
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kLanes = 8;

  static Int load_bytes(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static Int broadcast(const uint8_t* p) {
    return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p));
  }
  static Int set1_int(int32_t x) { return _mm256_set1_epi32(x); }
  static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Float set1(float x) { return _mm256_set1_ps(x); }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static Float convert(Int x) { return _mm256_cvtepi32_ps(x); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  // The low and the high four bits of every byte.
  static Int low_nibbles(Int x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Int high_nibbles(Int x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
  static Float load_bf16(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Float load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

}  // namespace
}  // namespace ktk
