// The product of ymm_i16.h for many rows: a run is looked up into scratch, 16 KiB that stay in L1
// while all tiles of rows pass them. The sums of a group are exact, so a row gets the same bits.
#pragma once

#include "mxfp4/ymm_i16.h"

namespace ktk::mxfp4 {
namespace {

constexpr size_t kRunDepth = 256;

struct I16Scratch {
  int32_t words[kRunDepth / 2][kBlockCols];  // of two k
};

inline size_t i16_scratch_size(const ktk_matrix*, size_t) { return sizeof(I16Scratch); }

// 16 columns from `col` on.
template <class Layout, size_t kRows>
inline void multiply_words(const ScaledKernel<Layout>& kernel, const I16Scratch& scratch,
                           const Tile& t, I16Rows<kRows> rows, size_t col) {
  using Scales = typename Layout::Scales;
  constexpr size_t kDepth = Scales::kGroupDepth;
  const int32_t* words = scratch.words[0] + col;
  YmmScales<Scales> scales(nullptr);
  for (const char *step = kernel.begin(t), *end = kernel.end(t); step != end;
       step += Layout::kStepBytes) {
    scales.begin(step);
#pragma GCC unroll 1
    for (size_t k = 0; k < kStepDepth; k += kDepth) {
      __m256i sum[kRows][2];
#pragma GCC unroll 6
      for (size_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = rows.template start<kDepth>(i);
#pragma GCC unroll 1
      for (size_t i = 0; i < kDepth; i += 2, words += kBlockCols) {
        const __m256i* pair = reinterpret_cast<const __m256i*>(words);
        const __m256i low = _mm256_load_si256(pair), high = _mm256_load_si256(pair + 1);
#pragma GCC unroll 6
        for (size_t row = 0; row < kRows; ++row) {
          const __m256i act = rows.pair(row, 0);
          add_pairs(sum[row][0], low, act);
          add_pairs(sum[row][1], high, act);
        }
        rows.codes.advance(kPairBytes);
      }
      add_scaled(sum, rows, scales, col, t.dst + col, t.dst_stride);
      scales.advance();
      rows.template advance_group<kDepth>(k);
    }
  }
}

template <class Layout>
class I16DecodedKernel : public I16Kernel<Layout> {
  using Scales = typename Layout::Scales;

 public:
  static constexpr size_t kMr = 6;
  static constexpr size_t kLineProducts = 4;
  static constexpr size_t kRunSlabs = kRunDepth / kStepDepth;

  explicit I16DecodedKernel(const ktk_matmul* mm)
      : I16Kernel<Layout>(mm), scratch_(static_cast<I16Scratch*>(mm->scratch)) {}

  void begin_run(const Run& run, Fetch fetch) const {
    const WordLookup lookup;
    __m256i* out = reinterpret_cast<__m256i*>(scratch_->words);
    for (const char *line = this->begin(run), *end = this->end(run); line != end;) {
      const char* step_end = line + Layout::kStepBytes;
      fetch.next_of<Scales::kLineBytes / kLine>();
      line += Scales::kLineBytes;
      for (; line != step_end; line += 2 * kLine, out += kLineCodes / 2 * kBlockCols / 8) {
        fetch.next();
        fetch.next();
#pragma GCC unroll 4
        for (size_t j = 0; j < kBlockCols / 8; ++j) {
          const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + j);
          _mm256_store_si256(out + j, lookup.pair<0>(codes));
          _mm256_store_si256(out + 4 + j, lookup.pair<1>(codes));
          _mm256_store_si256(out + 8 + j, lookup.pair<2>(codes));
          _mm256_store_si256(out + 12 + j, lookup.pair<3>(codes));
        }
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }

 private:
  template <size_t kRows>
  static void multiply(const I16DecodedKernel& kernel, const Tile& t) {
    const I16Rows<kRows> rows = kernel.template rows<kRows>(t);
    for (size_t col = 0; col < kBlockCols; col += kHalfCols) {
      multiply_words(kernel, *kernel.scratch_, t, rows, col);
    }
  }
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &I16DecodedKernel::multiply<kRows>; });

  I16Scratch* scratch_;
};

}  // namespace
}  // namespace ktk::mxfp4
