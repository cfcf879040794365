// BF16 with AVX2 and FMA: f32 rows, a register tile of up to 6 rows x 16 columns, twice per block.
//
// A cache line of weights holds pairs (k, k+1) of 16 columns, two registers. A shift makes f32 of
// the even k, a mask of the odd ones; each is multiplied with an act value broadcast from memory:
//
//   for even, odd k:   f32 of w0 (8 columns)   f32 of w1 (8 columns)
//   row 0:  act[0][k]  acc[0][0]               acc[0][1]
//   ...
//   row 5:  act[5][k]  acc[5][0]               acc[5][1]       12 sums, 2 weights, mask, broadcast
//
// Few rows take both tiles of a block at once (32 columns): a single row would have two chains of
// dependent additions otherwise, too few to keep up with memory.
#include <immintrin.h>
#include <string.h>

#include "variant.h"

namespace {

constexpr size_t kVectorCols = 8;

inline __m256 even_k(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
// The mask stays in memory: a register for it would be the seventeenth of the largest tile.
inline __m256 odd_k(__m256i pairs) {
  alignas(32) static constexpr uint32_t kOdd[] = {
      0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
      0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
  };
  __m256 odd;
  asm("vpand %2, %1, %0" : "=x"(odd) : "x"(pairs), "m"(kOdd));
  return odd;
}

// All sixteen registers are taken, so the order of instructions must stay as written: gcc 12 would
// load values early, or overwrite `a` or `w` with a sum, and spill. Hence volatile asm.
inline __m256 broadcast(const char* value) {
  __m256 a;
  asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*reinterpret_cast<const float*>(value)));
  return a;
}
inline void multiply_add(__m256& sum, __m256 a, __m256 w) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(w));
}

// kVectors: 2 for one tile of the block, 4 for both.
template <size_t kM, size_t kVectors, class Share>
inline void half_tile(const TileWork<Share>& work, size_t half, bool prefetch) {
  // Two row pointers, three rows apart, and the stride times 0, 1, 2: addressing modes do the rest.
  const size_t stride = work.act_stride;
  const char* act[(kM + 2) / 3];
  __m256 acc[kM][kVectors];
  float* dst = work.dst + half * kTileCols;
#pragma GCC unroll 2
  for (size_t i = 0; i < (kM + 2) / 3; ++i) act[i] = work.act + i * 3 * stride;
#pragma GCC unroll 6
  for (size_t i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      acc[i][j] = work.first ? _mm256_setzero_ps()
                             : _mm256_loadu_ps(dst + i * work.dst_stride + j * kVectorCols);
    }
  }
  const char* weight = work.weight + half * kTileBytes;
  for (size_t step = 0; step < work.steps; ++step, weight += kTileBytes) {
    if (prefetch) prefetch_step(work, step, weight);
    for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        // For the same reason: no loads of the odd half among the even ones.
        asm volatile("" : : : "memory");
        __m256 w[kVectors];
#pragma GCC unroll 4
        for (size_t j = 0; j < kVectors; ++j) {
          const __m256i pairs = _mm256_load_si256(
              reinterpret_cast<const __m256i*>(weight + j / 2 * kTileBytes + j % 2 * kLine / 2));
          w[j] = odd ? odd_k(pairs) : even_k(pairs);
        }
#pragma GCC unroll 6
        for (size_t i = 0; i < kM; ++i) {
          const __m256 a = broadcast(act[i / 3] + i % 3 * stride + odd * sizeof(float));
#pragma GCC unroll 4
          for (size_t j = 0; j < kVectors; ++j) multiply_add(acc[i][j], a, w[j]);
        }
      }
#pragma GCC unroll 2
      for (size_t i = 0; i < (kM + 2) / 3; ++i) act[i] += 2 * sizeof(float);
    }
  }
#pragma GCC unroll 6
  for (size_t i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      _mm256_storeu_ps(dst + i * work.dst_stride + j * kVectorCols, acc[i][j]);
    }
  }
}

template <size_t kM, class Share>
void tile(const TileWork<Share>& work) {
  if constexpr (kM <= 2) {
    half_tile<kM, 4>(work, 0, true);
  } else {
    half_tile<kM, 2>(work, 0, true);
    half_tile<kM, 2>(work, 1, false);
  }
}

struct Tile {
  static constexpr size_t kRows = 6;
  static constexpr size_t kRowStep = 1;
  static constexpr size_t kSteps = 8;      // 16 KiB of weights
  static constexpr size_t kLoneSteps = 8;  // its two halves share them
  static constexpr size_t kActBytes = sizeof(float);

  template <class Share>
  static void run(const TileWork<Share>& work) {
    static constexpr void (*kTiles[kRows])(const TileWork<Share>&) = {
        tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>,
    };
    kTiles[work.rows - 1](work);
  }
};

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_6x16", matmul<Tile>);

}  // namespace

extern "C" {
extern const ktk_variant KTK_VARIANT(bf16);
constexpr ktk_variant KTK_VARIANT(bf16) = make_variant<ActF32>(kUkernel);
}
