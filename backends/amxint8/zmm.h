// 512-bit registers as matmul.h wants them, without the product.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace ktk::amxint8 {
namespace {

struct Zmm {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16;

  static Int load_bytes(const void* p) { return _mm512_loadu_si512(p); }
  static Int broadcast(const uint8_t* p) {
    return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p));
  }
  static Int set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Float set1(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static Float convert(Int x) { return _mm512_cvtepi32_ps(x); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace ktk::amxint8
