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
    return _mm256_or_si256(masked(sign_mantissa, kSignMantissa),
                           _mm256_and_si256(exponent, _mm256_set1_epi16(0x7f80)));
  }
  static __m256i exchange_bytes(__m256i words) {
    return _mm256_shuffle_epi8(words, _mm256_set_epi64x(0x0e0f0c0d0a0b0809, 0x0607040502030001,
                                                        0x0e0f0c0d0a0b0809, 0x0607040502030001));
  }

  // The exponents of half a group, 8 columns of either tile: of lines a and c, then of b and d.
  struct Exponents {
    __m256i of[2];
  };
  Exponents exponents(const char* in, size_t half) const {
    const __m256i n = load(in, 2, half);
    return {{look_up(n), look_up(_mm256_srli_epi16(n, 4))}};
  }
  // Of a tile its line a or b, and c or d.
  static __m256i first_line(const char* in, size_t half, const Exponents& exponents, size_t tile) {
    return join(load(in, tile, half), _mm256_slli_epi16(exponents.of[tile], 7));
  }
  static __m256i second_line(const char* in, size_t half, const Exponents& exponents, size_t tile) {
    return join(exchange_bytes(load(in, tile, half)), _mm256_srli_epi16(exponents.of[tile], 1));
  }

  void group(const char* in, char* step, size_t number) const {
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const Exponents found = exponents(in, half);
#pragma GCC unroll 2
      for (size_t tile = 0; tile < 2; ++tile) {
        const auto store = [&](size_t line, __m256i weights) {
          char* const to = plain_line(step, number, line) + half * kLine / 2;
          _mm256_store_si256(reinterpret_cast<__m256i*>(to), weights);
        };
        store(tile, first_line(in, half, found, tile));
        store(2 + tile, second_line(in, half, found, tile));
      }
    }
  }

 private:
  static __m256i load(const char* in, size_t line, size_t half) {
    return _mm256_load_si256(
        reinterpret_cast<const __m256i*>(in + line * kLine + half * kLine / 2));
  }
  __m256i look_up(__m256i indices) const {
    return _mm256_shuffle_epi8(table, masked(indices, kIndex));
  }

  // Two of three masks stay in memory: gcc 12 would keep them in registers, and a sum of
  // ymm_kernel.h in memory.
  struct alignas(32) Mask {
    uint64_t parts[4];
  };
  static __m256i masked(__m256i bits, const Mask& mask) {
    __m256i result;
    asm("vpand %2, %1, %0" : "=x"(result) : "x"(bits), "m"(mask));
    return result;
  }
  static constexpr Mask kIndex = {
      {0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f}};
  static constexpr Mask kSignMantissa = {
      {0x807f807f807f807f, 0x807f807f807f807f, 0x807f807f807f807f, 0x807f807f807f807f}};
};

}  // namespace
}  // namespace ktk::bf16z
