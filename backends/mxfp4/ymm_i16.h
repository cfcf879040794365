// E2M1 times int16 rows on 256-bit registers: vpmaddwd multiplies two k of eight columns at once,
// and codes need three instructions to become its operand.
//
// A pair of k of a column is a word each in a dword (layout.h), so shifting and masking leaves two
// codes where two int16 belong, and vpshufb looks up both: the low byte by the code, and the high
// byte, which is zero, as code 0. Twice a value is an integer; with kOffset added, its low byte is
// positive and that of code 0 is 12. So what is looked up is
//
//   word(code) = 2 value(code) + 12 + 256 * 12 = 2 value(code) + kOffset
//
// and the sums of a group start at -kOffset * (sum of the row's codes), which ActI16 has ready. The
// sums themselves are below 2^24 and exact; on the way they may wrap around.
//
// Every output is dst = fma(sum * act scale, weight scale, dst), group after group of ascending k.
// Two groups of NVFP4 share a scale of act, which they are multiplied with once:
// dst = fma(fma(sum 1, weight scale 1, sum 0 * weight scale 0), act scale, dst). So a row gets the
// same bits in any batch.
#pragma once

#include <immintrin.h>

#include "codec/scaled/act_i16.h"
#include "codec/scaled/kernel.h"
#include "codec/scaled/ymm_scales.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

constexpr int kOffset = 12 + 256 * 12;
constexpr size_t kLineCodes = Codes::kLineDepth;  // k of a line
constexpr size_t kPairBytes = 2 * sizeof(int16_t);

// --- codes ---------------------------------------------------------------------------------------

struct WordLookup {
  __m256i words = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  __m256i mask = _mm256_set1_epi16(15);

  // Of eight columns the words of k 2i and 2i + 1.
  template <int i>
  __m256i pair(__m256i codes) const {
    if constexpr (i > 0) codes = _mm256_srli_epi16(codes, 4 * i);
    if constexpr (i < 3) codes = _mm256_and_si256(codes, mask);
    return _mm256_shuffle_epi8(words, codes);
  }
};

// --- rows ----------------------------------------------------------------------------------------

// What a tile reads of its rows, from the first k of a run on.
template <size_t kRows>
struct I16Rows {
  RowPointers<kRows> codes;
  const char *scales, *sums;  // of the first row
  size_t stride;

  // Volatile: gcc 12 would keep the pairs of all rows for the next columns, and spill sums.
  __m256i pair(size_t row, size_t i) const {
    __m256i act;
    asm volatile("vpbroadcastd %1, %0"
                 : "=x"(act)
                 : "m"(*reinterpret_cast<const int*>(codes.row(row) + i * kPairBytes)));
    return act;
  }
  // What the sums of a group of so many k start at.
  template <size_t kDepth>
  __m256i start(size_t row) const {
    const int* sum = reinterpret_cast<const int*>(sums + row * stride);
    __m256i all = _mm256_set1_epi32(sum[0]);
    if constexpr (kDepth > ActI16::kSumDepth) {
      all = _mm256_add_epi32(all, _mm256_set1_epi32(sum[1]));
    }
    return _mm256_mullo_epi32(all, _mm256_set1_epi32(-kOffset));
  }
  // Times what weights are to be multiplied with. asm, because gcc would multiply the scalar and
  // then broadcast a register, which wants a port that products want.
  __m256 scale(size_t row, float unit) const {
    __m256 scale;
    asm("vbroadcastss %1, %0"
        : "=x"(scale)
        : "m"(*reinterpret_cast<const float*>(scales + row * stride)));
    return _mm256_mul_ps(scale, _mm256_set1_ps(unit));
  }
  void advance_sums(size_t depth) { sums += depth / ActI16::kSumDepth * sizeof(int32_t); }
  void advance_scale() { scales += sizeof(float); }
};

// sum += the products of pairs. One piece of asm, so that gcc 12 keeps to sixteen registers.
inline void add_pairs(__m256i& sum, __m256i weights, __m256i act) {
  __m256i products, added = sum;  // what asm writes to an array stays there
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
      : "+x"(added), "=&x"(products)
      : "x"(weights), "x"(act));
  sum = added;
}

// --- sums to f32 ---------------------------------------------------------------------------------

// dst += scaled sums of the groups that share a scale of act, of the columns from `col` on. Words
// are twice the values, scales kUnit times too small. Source: where they are loaded from.
template <class Scales, class Source, size_t kRows, size_t kVectors>
struct ScaledSums {
  static constexpr size_t kGroups = ActI16::kGroup / Scales::kGroupDepth;
  static constexpr float kUnit = Scales::kUnit / 2;
  using Sums = __m256i[kRows][kVectors];
  using Parts = __m256[kRows][kVectors];

  const Source& scales;
  size_t col;
  Parts& parts;  // of the first of two groups

  static __m256 f32(__m256i sum) { return _mm256_cvtepi32_ps(sum); }

  void load(__m256 (&scale)[kVectors]) const {
#pragma GCC unroll 2
    for (size_t j = 0; j < kVectors; j += 2) scales.load(col + 8 * j, scale[j], scale[j + 1]);
  }
  // Of the first of two groups.
  [[gnu::always_inline]] void begin(const Sums& sum) const {
    __m256 scale[kVectors];
    load(scale);
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (size_t j = 0; j < kVectors; ++j) parts[i][j] = _mm256_mul_ps(f32(sum[i][j]), scale[j]);
    }
  }
  // Of the last group.
  [[gnu::always_inline]] void end(const Sums& sum, const I16Rows<kRows>& rows, float* dst,
                                  size_t dst_stride) const {
    __m256 scale[kVectors];
    load(scale);
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i, dst += dst_stride) {
      const __m256 act = rows.scale(i, kUnit);
#pragma GCC unroll 4
      for (size_t j = 0; j < kVectors; ++j) {
        const __m256 old = _mm256_loadu_ps(dst + 8 * j);
        __m256 value;
        if constexpr (kGroups == 1) {
          value = _mm256_fmadd_ps(_mm256_mul_ps(f32(sum[i][j]), act), scale[j], old);
        } else {
          value = _mm256_fmadd_ps(f32(sum[i][j]), scale[j], parts[i][j]);
          value = _mm256_fmadd_ps(value, act, old);
        }
        _mm256_storeu_ps(dst + 8 * j, value);
      }
    }
  }
};

// --- few rows: codes become words beside the products
// ---------------------------------------------

// A line of a vector of columns, times its rows. A single row's pairs are in registers for all
// columns.
template <size_t kRows, size_t kVectors>
[[gnu::always_inline]] inline void add_line(__m256i (&sum)[kRows][kVectors],
                                            const WordLookup& lookup, __m256i codes, size_t j,
                                            const I16Rows<kRows>& rows,
                                            const __m256i (&single)[4]) {
  unroll<4>([&]<size_t i> {
    const __m256i weights = lookup.pair<i>(codes);
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      add_pairs(sum[row][j], weights, kRows == 1 ? single[i] : rows.pair(row, i));
    }
  });
}

// The sums of a group, from `line` on.
template <size_t kDepth, size_t kRows, size_t kVectors>
[[gnu::always_inline]] inline void sum_codes(__m256i (&sum)[kRows][kVectors], const char*& line,
                                             I16Rows<kRows>& rows, Fetch& fetch) {
  const WordLookup lookup;
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i) {
    sum[i][0] = rows.template start<kDepth>(i);
#pragma GCC unroll 4
    for (size_t j = 1; j < kVectors; ++j) sum[i][j] = sum[i][0];
  }
  // gcc 12 unrolls two turns all the same, which is 6 % faster with one row than a loop of two, and
  // with two rows has no register left for a mask.
  const char* const end = line + kDepth / kLineCodes * 2 * kLine;
#pragma GCC unroll 1
  for (const char* last = kRows == 1 ? end : hidden(end); line != last; line += 2 * kLine) {
    __m256i single[4];
    if constexpr (kRows == 1) {
#pragma GCC unroll 4
      for (size_t pair = 0; pair < 4; ++pair) single[pair] = rows.pair(0, pair);
    }
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      if (j % 2 == 0) fetch.next_unseen();
      const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + j);
      add_line(sum, lookup, codes, j, rows, single);
    }
    rows.codes.advance(kLineCodes * sizeof(int16_t));
  }
  rows.advance_sums(kDepth);
}

// Of NVFP4, what the first of two groups gives: 8 vectors of the largest tile.
struct I16Parts {
  __m256 parts[8];
};

inline size_t i16_parts_size(const ktk_matrix*, size_t) { return sizeof(I16Parts); }

// kHalves of a block's 32 columns, from `half` on.
template <class Layout, size_t kRows, size_t kHalves>
inline void multiply_codes(const ScaledKernel<Layout>& kernel, I16Parts& scratch, const Tile& t,
                           size_t half, I16Rows<kRows> rows, Fetch& fetch) {
  using Scales = typename Layout::Scales;
  using Scaled = ScaledSums<Scales, YmmScales<Scales>, kRows, 2 * kHalves>;
  const size_t col = half * kHalfCols;
  YmmScales<Scales> scales(nullptr);
  static_assert(sizeof(typename Scaled::Parts) <= sizeof(I16Parts));
  const Scaled scaled{scales, col, reinterpret_cast<typename Scaled::Parts&>(scratch)};
  for (const char *step = kernel.begin(t), *end = kernel.end(t); step != end;
       step += Layout::kStepBytes) {
    scales.begin(step);
    const char* line = step + Scales::kLineBytes + half * kLine;
    if (half == 0) fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
    for (const char* step_end = hidden(line + Layout::kCodeBytes); line != step_end;) {
      if constexpr (Scaled::kGroups == 2) {
        typename Scaled::Sums sum;
        sum_codes<Scales::kGroupDepth>(sum, line, rows, fetch);
        scaled.begin(sum);
        scales.advance();
      }
      typename Scaled::Sums sum;
      sum_codes<Scales::kGroupDepth>(sum, line, rows, fetch);
      scaled.end(sum, rows, t.dst + col, t.dst_stride);
      scales.advance();
      rows.advance_scale();
    }
  }
}

// --- the kernels ---------------------------------------------------------------------------------

template <class Layout>
class I16Kernel : public ScaledKernel<Layout> {
 public:
  explicit I16Kernel(const ktk_matmul* mm)
      : ScaledKernel<Layout>(mm),
        scale_offset_(ActI16::scale_offset(mm->matrix)),
        sum_offset_(ActI16::sum_offset(mm->matrix)) {}

 protected:
  template <size_t kRows>
  I16Rows<kRows> rows(const Tile& t) const {
    const size_t k = t.begin * kStepDepth;
    return {{t.act + k * sizeof(int16_t), t.act_stride},
            t.act + scale_offset_ + k / ActI16::kGroup * sizeof(float),
            t.act + sum_offset_ + k / ActI16::kSumDepth * sizeof(int32_t),
            t.act_stride};
  }

 private:
  size_t scale_offset_, sum_offset_;
};

template <class Layout>
class I16CodesKernel : public I16Kernel<Layout> {
 public:
  static constexpr size_t kMr = 4;
  // Registers, as codec/scaled/ymm.h counts them, not lines, of which there are half as many: the
  // 128 codes of a line fill eight with int16. Decoding takes about as many instructions as
  // products of a row, so that one row wants what comes from further ahead (Zen 2: .80 of the
  // limit, from .70).
  static constexpr size_t kLineProducts = 8;
  // Two rows of 32 columns fill the registers, as four of 16 do.
  static size_t passes(size_t rows) { return rows <= 2 ? 1 : 2; }

  explicit I16CodesKernel(const ktk_matmul* mm)
      : I16Kernel<Layout>(mm), scratch_(static_cast<I16Parts*>(mm->scratch)) {}

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }

 private:
  template <size_t kRows>
  static void multiply(const I16CodesKernel& kernel, const Tile& t) {
    constexpr size_t kHalves = kRows <= 2 ? 2 : 1;
    const I16Rows<kRows> rows = kernel.template rows<kRows>(t);
    Fetch fetch = t.fetch;
    for (size_t half = 0; half < 2; half += kHalves) {
      multiply_codes<Layout, kRows, kHalves>(kernel, *kernel.scratch_, t, half, rows, fetch);
    }
  }
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &I16CodesKernel::multiply<kRows>; });

  I16Parts* scratch_;
};

}  // namespace
}  // namespace ktk::mxfp4
