// The product of the layouts of layout.h on 256-bit registers: f32 rows and FMA.
//
//   for each block of 32 columns
//     for each run of 128 k           decode it into scratch, 16 KiB of f32: stays in L1 ...
//       for each tile of up to 6 rows   ... while all rows of act pass it
//         for each group of k, 16 columns (1 or 2 rows: 32) in registers: add up products
//           dst += scale * sum
//
// Sixteen registers hold a tile's sums and little more, so nothing is decoded beside the products.
//
// Every output is one chain of additions over ascending k within a group, and one over groups, so a
// row gets the same bits in any batch.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "codec/scaled/layout.h"

namespace ktk {
namespace {

// --- scales: those of a group for 32 columns as f32 ----------------------------------------------

// Group `group` of a block; `step` is where the step starts that it begins in.
template <class Scales>
inline void load_group_scales(const char* block, const char* step, size_t group, float* out) {
  if constexpr (Scales::kLineBytes) {
    const char* exponents = step + group % 2 * kBlockCols;
    for (size_t col = 0; col < kBlockCols; col += 8) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents + col));
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23);
      // 0 means 2^-127. 255 means NaN, which is in `start` already.
      const __m256i least = _mm256_set1_epi32(0x00400000);
      _mm256_storeu_ps(out + col, _mm256_castsi256_ps(_mm256_max_epu32(bits, least)));
    }
  } else {
    const float* scales = reinterpret_cast<const float*>(block + kStartBytes);
    for (size_t col = 0; col < kBlockCols; ++col) {
      out[col] = Scales::kPerGroup ? scales[group] : scales[col];
    }
  }
}

// --- scratch -------------------------------------------------------------------------------------

constexpr size_t kRunDepth = 128;

struct YmmScratch {
  float weights[kRunDepth][kBlockCols];
  float scales[kRunDepth / MxScales::kGroupDepth][kBlockCols];  // of each group
};

inline size_t ymm_scratch_size(const ktk_matrix*, size_t) { return sizeof(YmmScratch); }

// --- the tile ------------------------------------------------------------------------------------

struct YmmTile {
  const char* act;  // first row, first k of the run
  size_t act_stride;
  const YmmScratch* run;
  size_t depth;  // of the run
  float* dst;
  size_t dst_stride;
};

inline void fma_in_place(__m256& sum, __m256 a, __m256 w) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(w));
}
// Volatile, as is the addition above: nearly all registers are taken, and the order of loads must
// stay as written.
inline __m256 broadcast_f32(const char* value) {
  __m256 a;
  asm volatile("vbroadcastss %1, %0" : "=x"(a) : "m"(*reinterpret_cast<const float*>(value)));
  return a;
}

// One group of kVectors * 8 columns.
template <class Decoder, size_t kRows, size_t kVectors>
inline void multiply_group(const YmmTile& tile, size_t k, size_t k_end, size_t col,
                           const float* scales) {
  constexpr size_t kPointers = (kRows + 2) / 3;
  const size_t stride = tile.act_stride;
  const char* act[kPointers];
#pragma GCC unroll 2
  for (size_t i = 0; i < kPointers; ++i) {
    act[i] = tile.act + k * sizeof(float) + i * 3 * stride;
  }
  __m256 sum[kRows][kVectors];
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) sum[i][j] = _mm256_setzero_ps();
  }
  const float* weights = tile.run->weights[k] + col;
  const float* end = tile.run->weights[k_end] + col;
#pragma GCC unroll 1
  for (; weights != end; weights += kBlockCols) {
    __m256 w[kVectors];
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) w[j] = _mm256_load_ps(weights + 8 * j);
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i) {
      const __m256 a = broadcast_f32(act[i / 3] + i % 3 * stride);
#pragma GCC unroll 4
      for (size_t j = 0; j < kVectors; ++j) fma_in_place(sum[i][j], a, w[j]);
    }
#pragma GCC unroll 2
    for (size_t i = 0; i < kPointers; ++i) act[i] += sizeof(float);
  }
  float* dst = tile.dst + col;
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i, dst += tile.dst_stride) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      const __m256 scale = _mm256_load_ps(scales + col + 8 * j);
      const __m256 value = Decoder::value(sum[i][j]);
      _mm256_storeu_ps(dst + 8 * j, _mm256_fmadd_ps(value, scale, _mm256_loadu_ps(dst + 8 * j)));
    }
  }
}

template <class Decoder, class Layout, size_t kRows>
void multiply_rows(const YmmTile& tile) {
  constexpr size_t kDepth = Layout::Scales::kGroupDepth;
  constexpr size_t kVectors = kRows <= 2 ? 4 : 2;
  const float* scales = tile.run->scales[0];
  for (size_t k = 0; k < tile.depth; k += kDepth, scales += kBlockCols) {
    const size_t k_end = smaller(k + kDepth, tile.depth);
    for (size_t col = 0; col < kBlockCols; col += 8 * kVectors) {
      multiply_group<Decoder, kRows, kVectors>(tile, k, k_end, col, scales);
    }
  }
}

// --- the loops around it -------------------------------------------------------------------------

// Decoder writes the values of a line, kLineDepth rows of 16 columns, kBlockCols floats apart.
template <class Decoder, class Layout>
inline void decode_run(const char* block, const char* step, size_t k, size_t depth,
                       YmmScratch* run) {
  using Scales = typename Layout::Scales;
  constexpr size_t kAhead = 4096;
  const Decoder decoder;
  float* out = run->weights[0];
  for (size_t from = 0; from < depth; from += kStepDepth, step += Layout::kStepBytes) {
    for (size_t at = from; at < from + kStepDepth; at += Scales::kGroupDepth) {
      load_group_scales<Scales>(block, step, (k + at) / Scales::kGroupDepth,
                                run->scales[at / Scales::kGroupDepth]);
    }
    const char* line = step + Scales::kLineBytes;
    const char* end = step + Layout::kStepBytes;
    for (; line != end; line += 2 * kLine, out += Layout::kLineDepth * kBlockCols) {
      _mm_prefetch(line + kAhead, _MM_HINT_T1);
      _mm_prefetch(line + kAhead + kLine, _MM_HINT_T1);
      decoder.decode(line, out);
      decoder.decode(line + kLine, out + kHalfCols);
    }
  }
}

template <class Decoder, class Layout>
void multiply_ymm(const ktk_matmul* mm) {
  constexpr size_t kMaxRows = 6;
  static constexpr void (*kTiles[kMaxRows])(const YmmTile&) = {
      multiply_rows<Decoder, Layout, 1>, multiply_rows<Decoder, Layout, 2>,
      multiply_rows<Decoder, Layout, 3>, multiply_rows<Decoder, Layout, 4>,
      multiply_rows<Decoder, Layout, 5>, multiply_rows<Decoder, Layout, 6>,
  };
  const ktk_matrix* matrix = mm->matrix;
  const size_t padded_k = Layout::num_steps(matrix) * kStepDepth;
  const size_t tiles = (mm->m + kMaxRows - 1) / kMaxRows;
  YmmScratch* run = static_cast<YmmScratch*>(mm->scratch);
  const char* block = static_cast<const char*>(mm->weight) + Layout::offset(matrix, mm->n_begin);
  float* dst = mm->dst;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kBlockCols) {
    for (size_t i = 0; i < mm->m; ++i) memcpy(dst + i * mm->dst_stride, block, kStartBytes);
    const char* step = block + Layout::header_bytes(matrix);
    for (size_t k = 0; k < padded_k; k += kRunDepth) {
      const size_t depth = smaller(padded_k - k, kRunDepth);
      decode_run<Decoder, Layout>(block, step, k, depth, run);
      step += depth / kStepDepth * Layout::kStepBytes;
      // Rows are dealt out evenly: 7 are 4 + 3, not 6 + 1.
      for (size_t i = 0, row = 0; i < tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / tiles;
        kTiles[row_end - row - 1]({
            .act = static_cast<const char*>(mm->act) + row * mm->act_stride + k * sizeof(float),
            .act_stride = mm->act_stride,
            .run = run,
            .depth = depth,
            .dst = dst + row * mm->dst_stride,
            .dst_stride = mm->dst_stride,
        });
        row = row_end;
      }
    }
    block += Layout::block_bytes(matrix);
    dst += kBlockCols;
  }
}

}  // namespace
}  // namespace ktk
