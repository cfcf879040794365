// The product of the layouts of layout.h on 256-bit registers: f32 rows and FMA.
//
// Sixteen registers hold a tile's sums and little more, so nothing is decoded beside the products:
// a run of 128 k is decoded into scratch, 16 KiB of f32 that stay in L1 while all tiles of rows
// pass them. A tile has up to 6 rows x 16 columns (1 or 2 rows: 32) and the sums of one group of k
// in registers, which are then scaled and added to dst.
//
// Every output is one chain of additions over ascending k within a group, and one over groups, so a
// row gets the same bits in any batch.
#pragma once

#include <immintrin.h>

#include "codec/scaled/kernel.h"

namespace ktk {
namespace {

// --- scratch -------------------------------------------------------------------------------------

constexpr size_t kRunDepth = 128;

struct YmmScratch {
  float weights[kRunDepth][kBlockCols];
  float scales[kRunDepth / NvScales::kGroupDepth][kBlockCols];  // of each group
};

inline size_t ymm_scratch_size(const ktk_matrix*, size_t) { return sizeof(YmmScratch); }

// Scales of eight columns as f32, divided by kUnit.
template <class Scales>
inline __m256 widen(__m128i eight);

template <>
inline __m256 widen<MxScales>(__m128i exponents) {
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(exponents), 23);
  // 0 means 2^-127. 255 means NaN, which is in `start` already.
  return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));
}

template <>
inline __m256 widen<NvScales>(__m128i codes) {
  // sign, a copy of it to remove, then the other seven bits
  const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
  return _mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(static_cast<short>(0xbf80))));
}

// The scales of 32 columns and one group.
template <class Scales>
inline void widen_scales(const char* scales, float* out) {
  for (size_t col = 0; col < kBlockCols; col += 8) {
    const __m128i* eight = reinterpret_cast<const __m128i*>(scales + col);
    _mm256_storeu_ps(out + col, widen<Scales>(_mm_loadl_epi64(eight)));
  }
}

// --- the tile ------------------------------------------------------------------------------------

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

// One group of kVectors * 8 columns: weights [begin, end), kBlockCols apart.
template <class Decoder, size_t kRows, size_t kVectors>
inline void multiply_group(const float* begin, const float* end, const float* scales,
                           const char* first_act, size_t act_stride, float* dst,
                           size_t dst_stride) {
  RowPointers<kRows> act(first_act, act_stride);
  __m256 sum[kRows][kVectors];
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) sum[i][j] = _mm256_setzero_ps();
  }
#pragma GCC unroll 1
  for (const float* weights = begin; weights != end; weights += kBlockCols) {
    __m256 w[kVectors];
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) w[j] = _mm256_load_ps(weights + 8 * j);
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i) {
      const __m256 a = broadcast_f32(act.row(i));
#pragma GCC unroll 4
      for (size_t j = 0; j < kVectors; ++j) fma_in_place(sum[i][j], a, w[j]);
    }
    act.advance(sizeof(float));
  }
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i, dst += dst_stride) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      const __m256 scale = _mm256_load_ps(scales + 8 * j);
      const __m256 value = Decoder::value(sum[i][j]);
      _mm256_storeu_ps(dst + 8 * j, _mm256_fmadd_ps(value, scale, _mm256_loadu_ps(dst + 8 * j)));
    }
  }
}

template <class Decoder, class Layout, size_t kRows>
void multiply_tile(const YmmScratch& scratch, size_t depth, const char* act, const Tile& t) {
  constexpr size_t kGroupDepth = Layout::Scales::kGroupDepth;
  constexpr size_t kVectors = kRows <= 2 ? 4 : 2;
  const float* scales = scratch.scales[0];
  for (size_t k = 0; k < depth; k += kGroupDepth, scales += kBlockCols) {
    const size_t k_end = smaller(k + kGroupDepth, depth);
    for (size_t col = 0; col < kBlockCols; col += 8 * kVectors) {
      multiply_group<Decoder, kRows, kVectors>(
          scratch.weights[k] + col, scratch.weights[k_end] + col, scales + col,
          act + k * sizeof(float), t.act_stride, t.dst + col, t.dst_stride);
    }
  }
}

// Decoder writes the values of a line, kLineDepth rows of 16 columns, kBlockCols floats apart.
template <class Decoder, class Layout>
class YmmKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;
  using Scales = typename Layout::Scales;

 public:
  static constexpr size_t kMr = 6;
  static constexpr size_t kLineProducts = Layout::kLineDepth * 2;
  static constexpr size_t kRunSlabs = kRunDepth / Base::kSlabDepth;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<Decoder, Layout, kRows>; });

  explicit YmmKernel(const ktk_matmul* mm)
      : Base(mm), scratch_(static_cast<YmmScratch*>(mm->scratch)) {}

  void begin_run(const Run& run, Fetch fetch) const {
    const Decoder decoder;
    float (*scales)[kBlockCols] = scratch_->scales;
    if constexpr (!Scales::kLineBytes) {
      static_assert(Scales::kGroupDepth == kRunDepth);
      const float* from = reinterpret_cast<const float*>(this->scales(run));
      for (size_t col = 0; col < kBlockCols; ++col) {
        scales[0][col] = from[Scales::kPerGroup ? 0 : col];
      }
    }
    float* out = scratch_->weights[0];
    for (const char *line = this->begin(run), *end = this->end(run); line != end;) {
      const char* step_end = line + Layout::kStepBytes;
      if constexpr (Scales::kLineBytes) {
        fetch.next_of<Scales::kLineBytes / kLine>();
        for (size_t at = 0; at < Scales::kLineBytes; at += kBlockCols) {
          widen_scales<Scales>(line + at, *scales++);
        }
        line += Scales::kLineBytes;
      }
      for (; line != step_end; line += 2 * kLine, out += Layout::kLineDepth * kBlockCols) {
        fetch.next();
        fetch.next();
        decoder.decode(line, out);
        decoder.decode(line + kLine, out + kHalfCols);
      }
    }
  }

  void tile(const Tile& t) const {
    const size_t depth = (this->end(t) - this->begin(t)) / Layout::kStepBytes * kStepDepth;
    kTiles[t.rows](*scratch_, depth, this->template act<sizeof(float)>(t), t);
  }

 private:
  YmmScratch* scratch_;
};

}  // namespace
}  // namespace ktk
