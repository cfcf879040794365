// Decoding on 512-bit registers: the table has words, and an index takes the low five bits of a
// word, of which the fifth means nothing.
#pragma once

#include <immintrin.h>

#include "bf16z/layout.h"

namespace ktk::bf16z {
namespace {

struct ZmmDecoder {
  __m512i table;

  explicit ZmmDecoder(const uint8_t* exponents) {
    const __m256i words =
        _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(exponents)));
    table = _mm512_broadcast_i64x4(_mm256_slli_epi16(words, 7));
  }

  // Sign and mantissa of the one, the exponent of the other.
  static __m512i join(__m512i sign_mantissa, __m512i exponent) {
    const __m512i mask = _mm512_set1_epi16(static_cast<short>(0x807f));
    return _mm512_ternarylogic_epi32(exponent, mask, sign_mantissa, 0xb8);  // mask ? one : other
  }
  static __m512i exchange_bytes(__m512i words) {
    return _mm512_shuffle_epi8(
        words, _mm512_set_epi64(0x0e0f0c0d0a0b0809, 0x0607040502030001, 0x0e0f0c0d0a0b0809,
                                0x0607040502030001, 0x0e0f0c0d0a0b0809, 0x0607040502030001,
                                0x0e0f0c0d0a0b0809, 0x0607040502030001));
  }
  __m512i exponents(__m512i indices) const { return _mm512_permutexvar_epi16(indices, table); }

  // Lines a and b of a group.
  [[gnu::always_inline]] void first_lines(const char* in, __m512i (&out)[2]) const {
    const __m512i n = _mm512_load_si512(in + 2 * kLine);
    out[0] = join(_mm512_load_si512(in), exponents(n));
    out[1] = join(_mm512_load_si512(in + kLine), exponents(_mm512_srli_epi16(n, 4)));
  }
  // Lines c and d.
  [[gnu::always_inline]] void second_lines(const char* in, __m512i (&out)[2]) const {
    const __m512i n = _mm512_load_si512(in + 2 * kLine);
    out[0] = join(exchange_bytes(_mm512_load_si512(in)), exponents(_mm512_srli_epi16(n, 8)));
    out[1] =
        join(exchange_bytes(_mm512_load_si512(in + kLine)), exponents(_mm512_srli_epi16(n, 12)));
  }

  void group(const char* in, char* step, size_t number) const {
    __m512i first[2], second[2];
    first_lines(in, first);
    second_lines(in, second);
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      _mm512_store_si512(plain_line(step, number, i), first[i]);
      _mm512_store_si512(plain_line(step, number, 2 + i), second[i]);
    }
  }
};

}  // namespace
}  // namespace ktk::bf16z
