// BF16 with AVX-512 FMA: f32 rows. A cache line of weights holds pairs (k, k+1) of 16 columns: a
// shift makes f32 of the even k, a mask of the odd ones, and each is multiplied with an act value
// broadcast from memory.
#pragma once

#include "bf16/zmm_tile.h"

namespace ktk::bf16 {
namespace {

struct DotF32 {
  static constexpr size_t kActBytes = sizeof(float);
  // As many products for a line as in zmm_bf16.h, which says what was measured.
  static constexpr size_t kInOrderRows = 4;
  static constexpr size_t kLineProducts = 2;

  // Not _mm512_slli_epi32: gcc 12 warns of an uninitialized variable inside its header.
  static __m512 even_k(__m512i pairs) { return (__m512)((__v16su)pairs << 16); }
  static __m512 odd_k(__m512i pairs) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static __m512 broadcast(const char* value) {
    float f;
    memcpy(&f, value, sizeof f);
    return _mm512_set1_ps(f);
  }
  // sum += a * w. Not _mm512_fmadd_ps: gcc 12 also picks the forms that overwrite `a` or `w`, and
  // copies registers to repair that.
  static void multiply_add(__m512& sum, __m512 a, __m512 w) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
  }

  template <size_t kRows, size_t kTiles>
  [[gnu::always_inline]] static void add(__m512 (&acc)[kRows][2], size_t tile,
                                         const __m512i (&pairs)[kTiles],
                                         const RowPointers<kRows>& act) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      // gcc 12 would load the odd half early, run out of registers and spill sums.
      asm volatile("" : : : "memory");
      __m512 w[kTiles];
#pragma GCC unroll 2
      for (size_t t = 0; t < kTiles; ++t) w[t] = odd ? odd_k(pairs[t]) : even_k(pairs[t]);
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) {
        const __m512 a = broadcast(act.row(i) + odd * sizeof(float));
#pragma GCC unroll 2
        for (size_t t = 0; t < kTiles; ++t) multiply_add(acc[i][tile + t], a, w[t]);
      }
    }
  }
};

}  // namespace
}  // namespace ktk::bf16
