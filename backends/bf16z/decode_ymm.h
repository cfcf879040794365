// Decoding on 256-bit registers: one look-up finds the exponents of two lines, in the low and in
// the high bytes of words.
#pragma once

#include <immintrin.h>

#include "bf16z/layout.h"

namespace ktk::bf16z {
namespace {

struct YmmDecoder {
  __m256i table;

  explicit YmmDecoder(const uint8_t* exponents)
      : table(_mm256_broadcastsi128_si256(
            _mm_load_si128(reinterpret_cast<const __m128i*>(exponents)))) {}

  static __m256i join(__m256i sign_mantissa, __m256i exponent) {
    const __m256i mask = _mm256_set1_epi16(0x7f80);
    return _mm256_or_si256(_mm256_andnot_si256(mask, sign_mantissa),
                           _mm256_and_si256(mask, exponent));
  }
  static __m256i exchange_bytes(__m256i words) {
    return _mm256_shuffle_epi8(words, _mm256_set_epi64x(0x0e0f0c0d0a0b0809, 0x0607040502030001,
                                                        0x0e0f0c0d0a0b0809, 0x0607040502030001));
  }
  __m256i exponents(__m256i indices) const {
    return _mm256_shuffle_epi8(table, _mm256_and_si256(indices, _mm256_set1_epi8(15)));
  }

  void group(const char* in, char* step, size_t number) const {
#pragma GCC unroll 2
    for (size_t half = 0; half < kLine; half += kLine / 2) {
      const auto load = [&](size_t line) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(in + line * kLine + half));
      };
      const auto store = [&](size_t line, __m256i weights) {
        char* const to = plain_line(step, number, line) + half;
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), weights);
      };
      const __m256i x = load(0), y = load(1), n = load(2);
      const __m256i ac = exponents(n), bd = exponents(_mm256_srli_epi16(n, 4));
      store(0, join(x, _mm256_slli_epi16(ac, 7)));
      store(1, join(y, _mm256_slli_epi16(bd, 7)));
      store(2, join(exchange_bytes(x), _mm256_srli_epi16(ac, 1)));
      store(3, join(exchange_bytes(y), _mm256_srli_epi16(bd, 1)));
    }
  }
};

}  // namespace
}  // namespace ktk::bf16z
