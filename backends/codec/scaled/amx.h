// The product of the layouts of layout.h with AMX: bf16 rows, tdpbf16ps for any number of
// rows.
//
//   for each block of 32 columns
//     for each run of 256 k         decode it into scratch as B tiles, 16 KiB: stays in L1 ...
//       for each 32 rows of act       ... while all rows, from L2, pass it
//
//                          B: 32 k of the run, 32 columns
//                          tmm6            tmm7
//   A: rows 0..15   tmm4   tmm0            tmm1
//      rows 16..31  tmm5   tmm2            tmm3
//
// Scales that are powers of two are exact factors of bf16: decoding applies them, and sums stay in
// tiles for the whole run. Any other scale waits for the sum of its group: tiles can only leave
// through memory, so sums are stored to scratch and added to dst from there.
#pragma once

#include <immintrin.h>

#include "codec/scaled/zmm.h"
#include "gemm/amx.h"

namespace ktk {
namespace {

constexpr size_t kTileRows = 16;
constexpr size_t kTileDepth = 32;
constexpr size_t kTileBytes = 1024;
constexpr size_t kAmxRunDepth = 256;
constexpr size_t kAmxRunSteps = kAmxRunDepth / kStepDepth;

struct AmxScratch {
  // [32 k][half] B tiles, then the sums of 32 rows x 32 columns.
  uint8_t weights[kAmxRunDepth / kTileDepth][2][kTileBytes];
  float sums[2 * kTileRows][kBlockCols];
};

inline size_t amx_scratch_size(const ktk_matrix*, size_t) { return sizeof(AmxScratch); }

// Pairs of bf16 times the scales of their columns, powers of two: exact in f32 within the range of
// normal numbers. The instruction takes smaller ones for zero; larger ones are infinite.
inline __m512i scale_pairs(__m512i pairs, __m512 scale) {
  const __m512i odd_mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 even = _mm512_castsi512_ps((__m512i)((__v16su)pairs << 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, odd_mask));
  const __m512i low = (__m512i)((__v16su)_mm512_castps_si512(_mm512_mul_ps(even, scale)) >> 16);
  const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
  return _mm512_ternarylogic_epi32(odd_mask, high, low, 0xca);  // mask ? high : low
}

// Decodes whole steps; `ahead` says what to fetch when a step is read.
template <class Decoder, class Layout, class Ahead>
inline void decode_tiles(const char* step, size_t steps, const Ahead& ahead, AmxScratch* scratch) {
  using Scales = typename Layout::Scales;
  constexpr size_t kTileLines = kTileDepth / Layout::kLineDepth;
  const Decoder decoder;
  uint8_t* out = scratch->weights[0][0];
  for (const char* end = step + steps * Layout::kStepBytes; step != end;) {
    const char* prefetch = ahead(step);
    ZmmScales<Scales> scales(nullptr);
    scales.begin(step);
    const char* line = step + Scales::kLineBytes;
    step += Layout::kStepBytes;
    if (Scales::kLineBytes) prefetch_l2(prefetch + Layout::kCodeBytes);
    while (line != step) {
      __m512 scale[2] = {};
      if constexpr (Scales::kLineBytes) {
        scale[0] = scales.load(0);
        scale[1] = scales.load(1);
        scales.advance();
      }
      for (size_t i = 0; i < kTileLines; ++i) {
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half, line += kLine, prefetch += kLine) {
          prefetch_l2(prefetch);
          const typename Decoder::Line codes = decoder.load(line);
#pragma GCC unroll 4
          for (size_t v = 0; v < Decoder::kVectors; ++v) {
            __m512i pairs = decoder.vector(codes, v);
            if constexpr (Scales::kLineBytes) pairs = scale_pairs(pairs, scale[half]);
            _mm512_store_si512(out + half * kTileBytes + (i * Decoder::kVectors + v) * kLine,
                               pairs);
          }
        }
      }
      out += 2 * kTileBytes;
    }
  }
  tile_memory_barrier();
}

// C += A x B for 32 (or 16) rows and `count` times 32 k.
template <bool kBothHalves>
inline void multiply_tiles(const char* act, size_t act_stride, const uint8_t* weights,
                           size_t count) {
  for (size_t i = 0; i < count; ++i) {
    _tile_loadd(6, weights, kLine);
    _tile_loadd(4, act, act_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + kTileBytes, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBothHalves) {
      _tile_loadd(5, act + kTileRows * act_stride, act_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weights += 2 * kTileBytes;
    act += kTileDepth * sizeof(uint16_t);
  }
}

template <bool kBothHalves>
inline void store_tiles(float* to, size_t stride) {
  tile_memory_barrier();
  _tile_stored(0, to, stride * sizeof(float));
  _tile_stored(1, to + kHalfCols, stride * sizeof(float));
  if constexpr (kBothHalves) {
    _tile_stored(2, to + kTileRows * stride, stride * sizeof(float));
    _tile_stored(3, to + kTileRows * stride + kHalfCols, stride * sizeof(float));
  }
  tile_memory_barrier();
}

struct AmxTile {
  const char* act;  // first row, first k of the run
  size_t act_stride, rows;
  AmxScratch* scratch;
  size_t tiles;        // of 32 k in the run
  const char* scales;  // of the run's first group
  float* dst;
  size_t dst_stride;
};

template <class Layout, bool kBothHalves>
inline void multiply_run(const AmxTile& tile) {
  using Scales = typename Layout::Scales;
  if constexpr (Scales::kLineBytes) {
    const size_t stride = tile.dst_stride * sizeof(float);
    float* lower = tile.dst + kTileRows * tile.dst_stride;
    _tile_loadd(0, tile.dst, stride);
    _tile_loadd(1, tile.dst + kHalfCols, stride);
    if constexpr (kBothHalves) {
      _tile_loadd(2, lower, stride);
      _tile_loadd(3, lower + kHalfCols, stride);
    }
    multiply_tiles<kBothHalves>(tile.act, tile.act_stride, tile.scratch->weights[0][0], tile.tiles);
    store_tiles<kBothHalves>(tile.dst, tile.dst_stride);
  } else {
    constexpr size_t kGroupTiles = Scales::kGroupDepth / kTileDepth;
    ZmmScales<Scales> scales(tile.scales);
    for (size_t at = 0; at < tile.tiles; at += kGroupTiles) {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kBothHalves) {
        _tile_zero(2);
        _tile_zero(3);
      }
      multiply_tiles<kBothHalves>(tile.act + at * kTileDepth * sizeof(uint16_t), tile.act_stride,
                                  tile.scratch->weights[at][0],
                                  smaller(kGroupTiles, tile.tiles - at));
      store_tiles<kBothHalves>(tile.scratch->sums[0], kBlockCols);
      const __m512 scale[2] = {scales.load(0), scales.load(1)};
      scales.advance();
      float* dst = tile.dst;
      for (size_t i = 0; i < tile.rows; ++i, dst += tile.dst_stride) {
        const float* sum = tile.scratch->sums[i];
        _mm512_storeu_ps(dst, _mm512_fmadd_ps(_mm512_load_ps(sum), scale[0], _mm512_loadu_ps(dst)));
        _mm512_storeu_ps(dst + kHalfCols, _mm512_fmadd_ps(_mm512_load_ps(sum + kHalfCols), scale[1],
                                                          _mm512_loadu_ps(dst + kHalfCols)));
      }
    }
  }
}

template <class Decoder, class Layout>
void multiply_amx(const ktk_matmul* mm) {
  const ktk_matrix* matrix = mm->matrix;
  const size_t steps = Layout::num_steps(matrix);
  const WeightRange<Layout> weights(mm, kLoneDistance);
  AmxScratch* scratch = static_cast<AmxScratch*>(mm->scratch);
  const TileRows config(mm->m);
  float* dst = mm->dst;
  for (const char* block = weights.begin; block != weights.end; block += weights.block_bytes) {
    weights.start_block(block, dst);
    for (size_t step = 0; step < steps; step += kAmxRunSteps) {
      const size_t count = smaller(steps - step, kAmxRunSteps);
      decode_tiles<Decoder, Layout>(
          block + weights.header + step * Layout::kStepBytes, count,
          [&](const char* weight) { return weights.ahead(weight); }, scratch);
      for (size_t row = 0; row < mm->m; row += 2 * kTileRows) {
        const AmxTile tile = {
            .act = static_cast<const char*>(mm->act) + row * mm->act_stride +
                   step * kStepDepth * sizeof(uint16_t),
            .act_stride = mm->act_stride,
            .rows = smaller(mm->m - row, 2 * kTileRows),
            .scratch = scratch,
            .tiles = count * kStepDepth / kTileDepth,
            .scales = weights.scales(block, step),
            .dst = dst + row * mm->dst_stride,
            .dst_stride = mm->dst_stride,
        };
        if (tile.rows > kTileRows) {
          multiply_run<Layout, true>(tile);
        } else {
          multiply_run<Layout, false>(tile);
        }
      }
    }
    dst += kBlockCols;
  }
}

}  // namespace
}  // namespace ktk
