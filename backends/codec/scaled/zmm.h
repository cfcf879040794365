// The product of the layouts of layout.h on 512-bit registers.
//
//   for each block of 32 columns                   one sequential stream of weights
//     for each run of up to kRunBytes                stays in L1 ...
//       for each tile of up to kMaxRows rows           ... while all rows of act, from L2, pass it
//         for each group of k, in registers: decode lines, add up products
//           dst += scale * sum
//
// A tile of 12 rows x 32 columns has 24 sums in registers. Codes are decoded in registers too, for
// each tile again: beside 12 products per register of weights that is little work, most of it on
// ports that products leave free. Decoding once for all tiles, into memory, gained nothing.
//
// Every output is one chain of additions over ascending k within a group, and one over groups, so a
// row gets the same bits in any batch.
#pragma once

#include <immintrin.h>

#include "codec/scaled/layout.h"
#include "gemm/weight_stream.h"

namespace ktk {
namespace {

// --- products: sum += weights times an act value that is broadcast from memory -------------------
// asm because gcc 12 would load and broadcast early, and run out of registers.

// Pairs of bf16.
struct DotBf16 {
  static void add(__m512& sum, __m512i weights, const char* act) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(weights), "m"(*reinterpret_cast<const int*>(act)));
  }
};

struct DotF32 {
  static void add(__m512& sum, __m512i weights, const char* act) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(weights), "m"(*reinterpret_cast<const float*>(act)));
  }
};

constexpr size_t kActBytes = 4;  // of what is broadcast: a pair of bf16 or one f32

// --- scales: those of 16 columns, as kernels read them -------------------------------------------

template <class Scales>
struct ZmmScales;

template <>
struct ZmmScales<MxScales> {
  static constexpr size_t kGroups = 2;  // with one scale line
  const char* line;

  explicit ZmmScales(const char*) {}
  void begin(const char* scale_line) { line = scale_line; }
  void advance() { line += kBlockCols; }
  __m512 load(size_t half) const {
    const __m128i* exponents = reinterpret_cast<const __m128i*>(line + half * kHalfCols);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(exponents)), 23);
    // 0 means 2^-127. 255 means NaN, which is in `start` already.
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
  }
};

template <>
struct ZmmScales<BlockScales> {
  static constexpr size_t kGroups = 1;
  const float* scale;

  explicit ZmmScales(const char* scales) : scale(reinterpret_cast<const float*>(scales)) {}
  void begin(const char*) {}
  void advance() { ++scale; }
  __m512 load(size_t) const { return _mm512_set1_ps(*scale); }
};

template <>
struct ZmmScales<RowScales> {
  static constexpr size_t kGroups = 1;
  const float* scales;

  explicit ZmmScales(const char* from) : scales(reinterpret_cast<const float*>(from)) {}
  void begin(const char*) {}
  void advance() {}
  __m512 load(size_t half) const { return _mm512_loadu_ps(scales + half * kHalfCols); }
};

// --- the tile ------------------------------------------------------------------------------------

struct ZmmTile {
  const char* act;  // first row, first k of the run
  size_t act_stride;
  const char *weight, *weight_end;  // steps
  const char* scales;               // ahead of the codes, of the run's first group
  float* dst;
  size_t dst_stride;
  const char* prefetch;
  size_t prefetch_step;  // per line
};

// Decoder makes kVectors registers of 16 columns of a line, one for each kActBytes of act.
template <class Decoder, class Layout, size_t kRows>
void multiply_tile(const ZmmTile& tile) {
  using Scales = typename Layout::Scales;
  constexpr size_t kPointers = (kRows + 2) / 3;
  constexpr size_t kUnroll = kRows <= 2 ? 4 : kRows <= 6 ? 2 : 1;
  constexpr size_t kLineActBytes = Decoder::kVectors * kActBytes;
  const Decoder decoder;
  const size_t prefetch_step = tile.prefetch_step;
  const char* prefetch = tile.prefetch;
  // Pointers three rows apart, and the stride times 0, 1, 2: addressing modes do the rest.
  const size_t stride = tile.act_stride;
  const char* act[kPointers];
#pragma GCC unroll 4
  for (size_t i = 0; i < kPointers; ++i) act[i] = tile.act + i * 3 * stride;
  ZmmScales<Scales> scales(tile.scales);
  for (const char* line = tile.weight; line != tile.weight_end;) {
    scales.begin(line);
    if constexpr (Scales::kLineBytes) {
      prefetch_l2(prefetch);
      prefetch += prefetch_step;
      line += Scales::kLineBytes;
    }
#pragma GCC unroll 1
    for (size_t group = 0; group < ZmmScales<Scales>::kGroups; ++group) {
      const char* end = line + Layout::kGroupBytes;
      // The last group may be one step short.
      if (Layout::kGroupBytes > Layout::kCodeBytes && end > tile.weight_end) end = tile.weight_end;
      __m512 sum[kRows][2];
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
      do {
#pragma GCC unroll 4
        for (size_t u = 0; u < kUnroll; ++u) {
#pragma GCC unroll 2
          for (size_t half = 0; half < 2; ++half, line += kLine) {
            prefetch_l2(prefetch);
            prefetch += prefetch_step;
            const typename Decoder::Line codes = decoder.load(line);
#pragma GCC unroll 8
            for (size_t v = 0; v < Decoder::kVectors; ++v) {
              const __m512i weights = decoder.vector(codes, v);
#pragma GCC unroll 12
              for (size_t i = 0; i < kRows; ++i) {
                Decoder::Dot::add(sum[i][half], weights,
                                  act[i / 3] + i % 3 * stride + v * kActBytes);
              }
            }
          }
#pragma GCC unroll 4
          for (size_t i = 0; i < kPointers; ++i) act[i] += kLineActBytes;
        }
      } while (line != end);
      const __m512 scale[2] = {scales.load(0), scales.load(1)};
      scales.advance();
      float* dst = tile.dst;
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i, dst += tile.dst_stride) {
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half) {
          float* to = dst + half * kHalfCols;
          _mm512_storeu_ps(
              to, _mm512_fmadd_ps(decoder.value(sum[i][half]), scale[half], _mm512_loadu_ps(to)));
        }
      }
    }
  }
}

constexpr size_t kMaxRows = 12;

template <class Decoder, class Layout>
struct ZmmTiles {
  void (*of_rows[kMaxRows + 1])(const ZmmTile&);

  template <size_t kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = multiply_tile<Decoder, Layout, kRows>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr ZmmTiles() : of_rows{} { fill(); }
};

// --- the loops around it -------------------------------------------------------------------------

// How far ahead of the arithmetic weights are fetched: by a lone tile, and by the tiles of a run.
constexpr size_t kLoneDistance = 8192;
constexpr size_t kRunBytes = 16384;
constexpr size_t kRunDistance = 16384;

// The blocks of one product, and what follows them in memory.
template <class Layout>
struct WeightRange {
  size_t m, block_bytes, header, distance;
  const char *begin, *end, *next;
  size_t dst_stride;

  // Fetches `ahead_by` bytes ahead.
  WeightRange(const ktk_matmul* mm, size_t ahead_by)
      : m(mm->m),
        block_bytes(Layout::block_bytes(mm->matrix)),
        header(Layout::header_bytes(mm->matrix)),
        distance(ahead_by),
        begin(static_cast<const char*>(mm->weight) + Layout::offset(mm->matrix, mm->n_begin)),
        end(begin + (mm->n_end - mm->n_begin + kBlockCols - 1) / kBlockCols * block_bytes),
        next(static_cast<const char*>(mm->next)),
        dst_stride(mm->dst_stride) {}

  // What to fetch when `weight` is used.
  const char* ahead(const char* weight) const {
    const char* at = weight + distance;
    return at < end || !next ? at : next + (at - end);
  }

  // Where the scales are that a block has ahead of its codes, from a step on.
  const char* scales(const char* block, size_t step) const {
    const size_t group = step * kStepDepth / Layout::Scales::kGroupDepth;
    return block + kStartBytes + (Layout::Scales::kPerGroup ? group * sizeof(float) : 0);
  }

  // Sums of all rows start at `start`.
  void start_block(const char* block, float* dst) const {
    const char* header_ahead = ahead(block);
    for (size_t i = 0; i < header; i += kLine) prefetch_l2(header_ahead + i);
    const float* start = reinterpret_cast<const float*>(block);
    const __m512 low = _mm512_loadu_ps(start), high = _mm512_loadu_ps(start + kHalfCols);
    for (size_t i = 0; i < m; ++i, dst += dst_stride) {
      _mm512_storeu_ps(dst, low);
      _mm512_storeu_ps(dst + kHalfCols, high);
    }
  }
};

template <class Decoder, class Layout>
void multiply_zmm(const ktk_matmul* mm) {
  static constexpr ZmmTiles<Decoder, Layout> kTiles;
  constexpr size_t kStepActBytes = kStepDepth / Layout::kLineDepth * Decoder::kVectors * kActBytes;
  constexpr size_t kRunSteps = round_up(kRunBytes / Layout::kStepBytes, 2);  // whole groups
  const size_t steps = Layout::num_steps(mm->matrix);
  const size_t tiles = (mm->m + kMaxRows - 1) / kMaxRows;
  const size_t run_steps = tiles == 1 ? steps : kRunSteps;
  const WeightRange<Layout> weights(mm, tiles > 1 ? kRunDistance : kLoneDistance);
  ZmmTile tile;
  tile.act_stride = mm->act_stride;
  tile.dst_stride = mm->dst_stride;
  // The tiles of a run together fetch as much as they read.
  tile.prefetch_step = kLine / tiles;
  float* dst = mm->dst;
  for (const char* block = weights.begin; block != weights.end; block += weights.block_bytes) {
    weights.start_block(block, dst);
    size_t count;
    for (size_t step = 0; step < steps; step += count) {
      count = smaller(steps - step, run_steps);
      tile.weight = block + weights.header + step * Layout::kStepBytes;
      tile.weight_end = tile.weight + count * Layout::kStepBytes;
      tile.scales = weights.scales(block, step);
      const size_t share = count * Layout::kStepBytes / tiles;
      // Rows are dealt out evenly: 13 are 7 + 6, not 12 + 1.
      for (size_t i = 0, row = 0; i < tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / tiles;
        tile.act = static_cast<const char*>(mm->act) + row * mm->act_stride + step * kStepActBytes;
        tile.dst = dst + row * mm->dst_stride;
        tile.prefetch = weights.ahead(tile.weight + i * share);
        kTiles.of_rows[row_end - row](tile);
        row = row_end;
      }
    }
    dst += kBlockCols;
  }
}

}  // namespace
}  // namespace ktk
