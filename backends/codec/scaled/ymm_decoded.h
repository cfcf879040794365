// The product of the layouts of layout.h on 256-bit registers, for many rows: a run of 128 k is
// decoded into scratch, 16 KiB of f32 that stay in L1 while all tiles of rows pass them. A tile has
// up to 6 rows x 16 columns, or 3 x 32.
//
// Sums are the same chains of additions as in ymm.h, so a row gets the same bits.
#pragma once

#include "codec/scaled/ymm.h"

namespace ktk {
namespace {

constexpr size_t kRunDepth = 128;

struct YmmScratch {
  float weights[kRunDepth][kNr];
};

inline size_t ymm_scratch_size(const ktk_matrix*, size_t) { return sizeof(YmmScratch); }

// The products of one k.
template <size_t kRows>
inline void add_depth(__m256 (&sum)[kRows][2], const float* weights,
                      const RowPointers<kRows>& act) {
  const __m256 low = _mm256_load_ps(weights), high = _mm256_load_ps(weights + 8);
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
    const __m256 a = broadcast_f32(act.row(i));
    fma_in_place(sum[i][0], a, low);
    fma_in_place(sum[i][1], a, high);
  }
}

// Few rows stay in registers while weights of all columns pass.
template <size_t kRows>
inline void add_depth(__m256 (&sum)[kRows][4], const float* weights,
                      const RowPointers<kRows>& act) {
  __m256 a[kRows];
#pragma GCC unroll 3
  for (size_t i = 0; i < kRows; ++i) a[i] = broadcast_f32(act.row(i));
#pragma GCC unroll 4
  for (size_t j = 0; j < 4; ++j) {
    const __m256 w = _mm256_load_ps(weights + 8 * j);
#pragma GCC unroll 3
    for (size_t i = 0; i < kRows; ++i) fma_in_place(sum[i][j], a[i], w);
  }
}

// kVectors of 8 columns from `col` on.
template <class Decoder, class Layout, size_t kRows, size_t kVectors>
inline void multiply_decoded(const ScaledKernel<Layout>& kernel, const YmmScratch& scratch,
                             const Tile& t, size_t col) {
  using Scales = typename Layout::Scales;
  constexpr size_t kGroups = ceil_div(kStepDepth, Scales::kGroupDepth);
  RowPointers<kRows> act(kernel.template act<sizeof(float)>(t), t.act_stride);
  YmmScales<Scales> scales(kernel.scales(t));
  const char* step = kernel.begin(t);
  const size_t depth = (kernel.end(t) - step) / Layout::kStepBytes * kStepDepth;
  const float* weights = scratch.weights[0] + col;
  for (const float* const run_end = weights + depth * kNr; weights != run_end;) {
    scales.begin(step);
    step += Layout::kStepBytes;
#pragma GCC unroll 1
    for (size_t group = 0; group < kGroups; ++group) {
      const float* end = weights + Scales::kGroupDepth * kNr;
      // The last group may be one step short.
      if (Scales::kGroupDepth > kStepDepth && end > run_end) end = run_end;
      __m256 sum[kRows][kVectors];
      clear(sum);
#pragma GCC unroll 1
      for (; weights != end; weights += kNr) {
        add_depth(sum, weights, act);
        act.advance(sizeof(float));
      }
      add_scaled<Decoder>(sum, scales, col, t.dst + col, t.dst_stride);
      scales.advance();
    }
  }
}

template <class Decoder, class Layout>
class YmmDecodedKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;
  using Scales = typename Layout::Scales;

 public:
  static constexpr size_t kMr = 6;
  static constexpr size_t kLineProducts = Layout::kLineDepth * 2;
  static constexpr size_t kRunSlabs = kRunDepth / Base::kSlabDepth;
  static constexpr size_t kRowSums = 2;
  static constexpr size_t kShortRows = 3;  // 12 sums, 3 values of act and a weight: 16 registers

  explicit YmmDecodedKernel(const ktk_matmul* mm)
      : Base(mm), scratch_(static_cast<YmmScratch*>(mm->scratch)) {}

  void begin_run(const Run& run, Fetch fetch) const {
    float* out = scratch_->weights[0];
    for (const char *line = this->begin(run), *end = this->end(run); line != end;) {
      const char* step_end = line + Layout::kStepBytes;
      if constexpr (Scales::kLineBytes) {
        fetch.next_unseen_of<Scales::kLineBytes / kLine>();
        line += Scales::kLineBytes;
      }
      for (; line != step_end; line += 2 * kLine, out += Layout::kLineDepth * kNr) {
        fetch.next();
        fetch.next();
        decode(line, out);
        decode(line + kLine, out + kHalfCols);
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }

 private:
  static void decode(const char* line, float* out) {
    const typename Decoder::Line codes(line);
#pragma GCC unroll 8
    for (size_t k = 0; k < Layout::kLineDepth; ++k, out += kNr) {
      __m256 low, high;
      codes.vectors(k, low, high);
      _mm256_store_ps(out, low);
      _mm256_store_ps(out + 8, high);
    }
  }
  template <size_t kRows>
  static void multiply(const YmmDecodedKernel& kernel, const Tile& t) {
    constexpr size_t kVectors = kRows <= kShortRows ? 4 : 2;
    for (size_t col = 0; col < kNr; col += 8 * kVectors) {
      multiply_decoded<Decoder, Layout, kRows, kVectors>(kernel, *kernel.scratch_, t, col);
    }
  }
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &YmmDecodedKernel::multiply<kRows>; });

  YmmScratch* scratch_;
};

}  // namespace
}  // namespace ktk
