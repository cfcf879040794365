// The product of ymm_i16.h for many rows: a run is looked up into scratch, 18 KiB that stay in L1
// while all tiles of rows pass them: words, less their offset, so that sums start at the products
// of the first pair, and scales. The sums of a group are exact, so a row gets the same bits.
#pragma once

#include "mxfp4/ymm_i16.h"

namespace ktk::mxfp4 {
namespace {

constexpr size_t kRunDepth = 256;

constexpr size_t kMostRows = 6;

struct I16Scratch {
  alignas(kLine) int32_t words[kRunDepth / 2][kNr];                      // of two k
  alignas(kLine) __m256 scales[kRunDepth / ActI16::kSumDepth][kNr / 8];  // of a group
  alignas(kLine) __m256 parts[kMostRows][2];
};

// Scales as YmmScales has them, from scratch.
struct DecodedScales {
  const __m256* group;

  void advance() { group += kNr / 8; }
  void load(size_t col, __m256& low, __m256& high) const {
    low = group[col / 8];
    high = group[col / 8 + 1];
  }
};

inline size_t i16_scratch_size(const ktk_matrix*, size_t) { return sizeof(I16Scratch); }

// The pair of k that is kBytes behind a pointer and kTimes rows: as one instruction, since gcc 12
// would keep the offset of each pair and row for the next turn, in memory. Volatile as in I16Rows.
template <size_t kTimes, size_t kBytes>
inline __m256i broadcast_pair(const char* row, size_t stride) {
  static_assert(kTimes < 3);
  __m256i act;
  if constexpr (kTimes == 0) {
    asm volatile("vpbroadcastd %c2(%1), %0" : "=x"(act) : "r"(row), "i"(kBytes));
  } else if constexpr (kTimes == 1) {
    asm volatile("vpbroadcastd %c3(%1, %2), %0" : "=x"(act) : "r"(row), "r"(stride), "i"(kBytes));
  } else {
    asm volatile("vpbroadcastd %c3(%1, %2, 2), %0"
                 : "=x"(act)
                 : "r"(row), "r"(stride), "i"(kBytes));
  }
  return act;
}

// The same as add_pairs() of both; products ahead of both additions are 3 % faster than in turn.
inline void add_pairs(__m256i& low_sum, __m256i& high_sum, __m256i low, __m256i high, __m256i act) {
  __m256i products, sum0 = low_sum, sum1 = high_sum;  // what asm writes to an array stays there
  asm("vpmaddwd %[act], %[low], %[products]\n\t"
      "vpmaddwd %[act], %[high], %[act]\n\t"
      "vpaddd %[products], %[sum0], %[sum0]\n\t"
      "vpaddd %[act], %[sum1], %[sum1]"
      : [sum0] "+x"(sum0), [sum1] "+x"(sum1), [act] "+x"(act), [products] "=&x"(products)
      : [low] "x"(low), [high] "x"(high));
  low_sum = sum0;
  high_sum = sum1;
}

// The sums of 16 columns and kDepth of k.
template <size_t kDepth, size_t kRows>
[[gnu::always_inline]] inline void sum_words(__m256i (&sum)[kRows][2], const int32_t*& words,
                                             I16Rows<kRows>& rows) {
  unroll<kDepth / 2>([&]<size_t i> {
    const __m256i* pair = reinterpret_cast<const __m256i*>(words + i * kNr);
    const __m256i low = _mm256_load_si256(pair), high = _mm256_load_si256(pair + 1);
    unroll<kRows>([&]<size_t row> {
      const __m256i act =
          broadcast_pair<row % 3, i * kPairBytes>(rows.codes.pointers[row / 3], rows.codes.stride);
      if constexpr (i == 0) {
        sum[row][0] = _mm256_madd_epi16(low, act);
        sum[row][1] = _mm256_madd_epi16(high, act);
      } else {
        add_pairs(sum[row][0], sum[row][1], low, high, act);
      }
    });
  });
  words += kDepth / 2 * kNr;
  rows.codes.advance(kDepth * sizeof(int16_t));
}

// 16 columns from `col` on.
template <class Layout, size_t kRows>
inline void multiply_words(const ScaledKernel<Layout>& kernel, I16Scratch& scratch, const Tile& t,
                           I16Rows<kRows> rows, size_t col) {
  using Scales = typename Layout::Scales;
  using Scaled = ScaledSums<Scales, DecodedScales, kRows, 2>;
  const int32_t* words = scratch.words[0] + col;
  DecodedScales scales{scratch.scales[0]};
  const Scaled scaled{scales, col, reinterpret_cast<typename Scaled::Parts&>(scratch.parts)};
  for (const char *step = kernel.begin(t), *end = kernel.end(t); step != end;
       step += Layout::kStepBytes) {
    // gcc unrolls two turns that it can count, whatever it is told.
    for (const int32_t* step_end = hidden(words + kStepDepth / 2 * kNr); words != step_end;) {
      if constexpr (Scaled::kGroups == 2) {
        typename Scaled::Sums sum;
        sum_words<Scales::kGroupDepth>(sum, words, rows);
        scaled.begin(sum);
        scales.advance();
      }
      typename Scaled::Sums sum;
      sum_words<Scales::kGroupDepth>(sum, words, rows);
      scaled.end(sum, rows, t.dst + col, t.dst_stride);
      scales.advance();
      rows.advance_scale();
    }
  }
}

template <class Layout>
class I16DecodedKernel : public I16Kernel<Layout> {
  using Scales = typename Layout::Scales;

 public:
  static constexpr size_t kMr = kMostRows;
  static constexpr size_t kLineProducts = 4;
  static constexpr size_t kRunSlabs = kRunDepth / kStepDepth;

  explicit I16DecodedKernel(const ktk_matmul* mm)
      : I16Kernel<Layout>(mm), scratch_(static_cast<I16Scratch*>(mm->scratch)) {}

  void begin_run(const Run& run, Fetch fetch) const {
    const WordLookup lookup;
    const auto value = [offset = _mm256_set1_epi16(kOffset)](__m256i words) {
      return _mm256_sub_epi16(words, offset);
    };
    __m256i* out = reinterpret_cast<__m256i*>(scratch_->words);
    __m256* scale = scratch_->scales[0];
    YmmScales<Scales> scales(nullptr);
    for (const char *line = this->begin(run), *end = this->end(run); line != end;) {
      const char* step_end = line + Layout::kStepBytes;
      fetch.next_unseen_of<Scales::kLineBytes / kLine>();
      scales.begin(line);
      for (size_t k = 0; k < kStepDepth; k += Scales::kGroupDepth, scales.advance()) {
        for (size_t col = 0; col < kNr; col += kHalfCols, scale += 2) {
          scales.load(col, scale[0], scale[1]);
        }
      }
      line += Scales::kLineBytes;
      for (; line != step_end; line += 2 * kLine, out += kLineCodes / 2 * kNr / 8) {
        fetch.next();
        fetch.next();
#pragma GCC unroll 4
        for (size_t j = 0; j < kNr / 8; ++j) {
          const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + j);
          _mm256_store_si256(out + j, value(lookup.pair<0>(codes)));
          _mm256_store_si256(out + 4 + j, value(lookup.pair<1>(codes)));
          _mm256_store_si256(out + 8 + j, value(lookup.pair<2>(codes)));
          _mm256_store_si256(out + 12 + j, value(lookup.pair<3>(codes)));
        }
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }

 private:
  template <size_t kRows>
  static void multiply(const I16DecodedKernel& kernel, const Tile& t) {
    const I16Rows<kRows> rows = kernel.template rows<kRows>(t);
    for (size_t col = 0; col < kNr; col += kHalfCols) {
      multiply_words(kernel, *kernel.scratch_, t, rows, col);
    }
  }
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &I16DecodedKernel::multiply<kRows>; });

  I16Scratch* scratch_;
};

}  // namespace
}  // namespace ktk::mxfp4
