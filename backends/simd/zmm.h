// 512-bit registers as the integer products want them, without the product itself.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace ktk {
namespace {

struct Zmm {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16;

  static Int load_bytes(const void* p) { return _mm512_loadu_si512(p); }
  static Int broadcast(const void* p) { return _mm512_set1_epi32(*static_cast<const int32_t*>(p)); }
  static Int set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  // x / 2^bits, rounded down.
  template <int kBits>
  static Int divide_int(Int x) {
    return _mm512_srai_epi32(x, kBits);
  }
  template <int kBits>
  static Int shift_left_int(Int x) {
    return _mm512_slli_epi32(x, kBits);
  }
  // Zeros come in.
  template <int kBits>
  static Int shift_right_int(Int x) {
    return _mm512_srli_epi32(x, kBits);
  }
  static Int multiply_int(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static Int max_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
  static Float as_float(Int bits) { return _mm512_castsi512_ps(bits); }
  // a where x < limit, b elsewhere.
  static Float select_below(Int x, int limit, Float a, Float b) {
    return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(x, set1_int(limit)), b, a);
  }
  // x with the highest bit of `bits` for its sign.
  static Float with_sign(Float x, Int bits) {
    const Int is_sign = set1_int(INT32_MIN);
    return as_float(_mm512_ternarylogic_epi32(is_sign, bits, _mm512_castps_si512(x), 0xca));
  }
  static Float set1(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static Float convert(Int x) { return _mm512_cvtepi32_ps(x); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  // The low and the high four bits of every byte.
  static Int low_nibbles(Int x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Int high_nibbles(Int x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
  // Bytes: table[index] of sixteen entries, bit operations, and shifts that move bits between the
  // two bytes of a word.
  static Int set1_byte(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static Int load_table(const void* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static Int shuffle(Int table, Int index) { return _mm512_shuffle_epi8(table, index); }
  static Int add_bytes(Int a, Int b) { return _mm512_add_epi8(a, b); }
  static Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int bit_or(Int a, Int b) { return _mm512_or_si512(a, b); }
  static Int shift_left(Int x, int bits) { return _mm512_slli_epi16(x, bits); }
  static Int shift_right(Int x, int bits) { return _mm512_srli_epi16(x, bits); }
  static void store_bytes(void* p, Int x) { _mm512_storeu_si512(p, x); }
  // Bytes as numbers.
  static Float load_i8(const void* p) {
    return convert(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
  }
  static Int load_u8_int(const void* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static Int load_u16_int(const void* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static Float load_u8(const void* p) { return convert(load_u8_int(p)); }
  static Float load_bf16(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Float load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

}  // namespace
}  // namespace ktk
