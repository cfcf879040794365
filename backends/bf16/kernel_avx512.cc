// BF16 with AVX-512 FMA: f32 rows, a register tile of up to 12 rows x 32 columns.
//
// A cache line of weights holds pairs (k, k+1) of 16 columns. A shift makes f32 of the even k, a
// mask of the odd ones; each is multiplied with an act value broadcast from memory:
//
//   for even, odd k:    f32 of w0          f32 of w1
//   row 0:   act[0][k]  acc[0][0]          acc[0][1]
//   ...
//   row 11:  act[11][k] acc[11][0]         acc[11][1]      24 sums, 2 weights, mask, broadcasts
#include <immintrin.h>
#include <string.h>

#include "variant.h"

namespace {

// Not _mm512_slli_epi32: gcc 12 warns of an uninitialized variable inside its header.
inline __m512 even_k(__m512i pairs) { return (__m512)((__v16su)pairs << 16); }
inline __m512 odd_k(__m512i pairs) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline __m512 broadcast(const char* value) {
  float f;
  memcpy(&f, value, sizeof f);
  return _mm512_set1_ps(f);
}

// sum += a * w. Not _mm512_fmadd_ps: gcc 12 also picks the forms that overwrite `a` or `w`, and
// copies registers to repair that.
inline void multiply_add(__m512& sum, __m512 a, __m512 w) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}

template <size_t kM, class Share>
void tile(const TileWork<Share>& work) {
  // Four row pointers, three rows apart, and the stride times 0, 1, 2: addressing modes do the
  // rest.
  const size_t stride = work.act_stride;
  const char* act[(kM + 2) / 3];
  __m512 acc[kM][2];
#pragma GCC unroll 4
  for (size_t i = 0; i < (kM + 2) / 3; ++i) act[i] = work.act + i * 3 * stride;
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
    const float* dst = work.dst + i * work.dst_stride;
    acc[i][0] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
    acc[i][1] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + kTileCols);
  }
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step, weight += kTileBytes) {
    prefetch_step(work, step, weight);
    for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
      const __m512i pairs0 = _mm512_load_si512(weight);
      const __m512i pairs1 = _mm512_load_si512(weight + kTileBytes);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        // gcc 12 would load the odd half early, run out of registers and spill sums.
        asm volatile("" : : : "memory");
        const __m512 w0 = odd ? odd_k(pairs0) : even_k(pairs0);
        const __m512 w1 = odd ? odd_k(pairs1) : even_k(pairs1);
#pragma GCC unroll 12
        for (size_t i = 0; i < kM; ++i) {
          const __m512 a = broadcast(act[i / 3] + i % 3 * stride + odd * sizeof(float));
          multiply_add(acc[i][0], a, w0);
          multiply_add(acc[i][1], a, w1);
        }
      }
#pragma GCC unroll 4
      for (size_t i = 0; i < (kM + 2) / 3; ++i) act[i] += 2 * sizeof(float);
    }
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
    float* dst = work.dst + i * work.dst_stride;
    _mm512_storeu_ps(dst, acc[i][0]);
    _mm512_storeu_ps(dst + kTileCols, acc[i][1]);
  }
}

struct Tile {
  static constexpr size_t kRows = 12;
  static constexpr size_t kRowStep = 1;
  static constexpr size_t kSteps = 8;  // 16 KiB of weights
  static constexpr size_t kLoneSteps = SIZE_MAX;
  static constexpr size_t kActBytes = sizeof(float);

  template <class Share>
  static void run(const TileWork<Share>& work) {
    static constexpr void (*kTiles[kRows])(const TileWork<Share>&) = {
        tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
        tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
    };
    kTiles[work.rows - 1](work);
  }
};

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_12x32", matmul<Tile>);

}  // namespace

extern "C" {
extern const ktk_variant KTK_VARIANT(bf16);
constexpr ktk_variant KTK_VARIANT(bf16) = make_variant<ActF32>(kUkernel);
}
