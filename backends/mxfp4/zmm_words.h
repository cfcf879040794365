// The product of zmm_bytes.h for more rows. vpdpwssd multiplies two k of sixteen columns at once
// with the 16-bit codes of a row: as many products as those of high and low bytes are, without an
// offset to take away and without two sums to bring together.
//
//   vpermw looks up twice a value by the low four bits of each word of a line (layout.h), which
//   makes the pair (k0, k1) of sixteen columns, and after a shift the next pair
//
// A lone tile decodes in registers, beside the products. Several tiles share a run that becomes
// words in scratch, 16 KiB that stay in L1 while they pass. Sums are the same integers as those of
// bytes, so a row gets the same bits.
#pragma once

#include "mxfp4/zmm_bytes.h"

namespace ktk::mxfp4 {
namespace {

constexpr size_t kPair = 2 * sizeof(int16_t);  // bytes of act of one product
constexpr size_t kLinePairs = Codes::kLineDepth / 2;

struct WordLookup {
  __m512i words = _mm512_broadcast_i64x4(
      _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));

  __m512i pair(__m512i codes, unsigned i) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), words);
  }
};

// asm for the same reason as that of add_fours().
inline void add_pairs(__m512i& sum, __m512i weights, __m512i act) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(act));
}

// Where the pairs of two lines of codes come from, one of each half of a block.
struct CodedPairs {
  static constexpr bool kIsDecoded = false;
  static constexpr size_t kFetches = 2;  // lines that are used
  WordLookup lookup;
  const char* line = nullptr;

  void begin_step(const char* first_line) { line = first_line; }
  __m512i pair(size_t half, unsigned i) const {
    return lookup.pair(_mm512_load_si512(line + half * kLine), i);
  }
  void advance() { line += 2 * kLine; }
};

// What decode() wrote.
struct DecodedPairs {
  static constexpr bool kIsDecoded = true;
  static constexpr size_t kFetches = kLinePairs;  // one beside each pair of k
  const char* words;

  void begin_step(const char*) {}
  __m512i pair(size_t half, unsigned i) const {
    return _mm512_load_si512(words + (2 * i + half) * kLine);
  }
  void advance() { words += 2 * kLinePairs * kLine; }
};

inline char* decode(const WordLookup& lookup, const char* line, char* out) {
  const __m512i left = _mm512_load_si512(line), right = _mm512_load_si512(line + kLine);
#pragma GCC unroll 4
  for (unsigned i = 0; i < kLinePairs; ++i, out += 2 * kLine) {
    _mm512_store_si512(out, lookup.pair(left, i));
    _mm512_store_si512(out + kLine, lookup.pair(right, i));
  }
  return out;
}

// A group, `kPart` of those that share a group of act.
template <class Scales, class Pairs, size_t kRows, size_t kPart>
[[gnu::always_inline]] inline void multiply_group_of_words(Pairs& pairs, RowPointers<kRows>& words,
                                                           const RowPointers<kRows>& ends,
                                                           const ZmmScales<Scales>& scales,
                                                           __m512 (&first)[kRows][2], const Tile& t,
                                                           Fetch& fetch) {
  __m512i sum[kRows][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
#pragma GCC unroll 1
  for (size_t k = 0; k < Scales::kGroupDepth; k += Codes::kLineDepth) {
    fetch.template next_unseen_of<Pairs::kFetches>();
    unroll<kLinePairs>([&]<size_t pair>() __attribute__((always_inline)) {
      const __m512i left = pairs.pair(0, pair), right = pairs.pair(1, pair);
      words.forget_rows();
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) {
        const __m512i both =
            _mm512_set1_epi32(*reinterpret_cast<const int*>(words.row(i) + pair * kPair));
        add_pairs(sum[i][0], left, both);
        add_pairs(sum[i][1], right, both);
      }
    });
    pairs.advance();
    words.advance(kLinePairs * kPair);
  }
  const __m512 scale[2] = {weight_scale(scales, 0), weight_scale(scales, 1)};
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    float* const dst = t.dst + i * t.dst_stride;
    const float half_scale = reinterpret_cast<const ActGroupEnd*>(ends.row(i))->half_scale;
    add_scaled<Scales, kPart>(dst, sum[i][0], half_scale, scale[0], first[i][0]);
    add_scaled<Scales, kPart>(dst + kHalfCols, sum[i][1], half_scale, scale[1], first[i][1]);
  }
}

template <class Layout, class Pairs, size_t kRows>
void multiply_words(const ScaledKernel<Layout>& kernel, const ktk_matrix* matrix, Pairs pairs,
                    const Tile& tile) {
  using Scales = typename Layout::Scales;
  const Tile t = tile;  // a copy that stores to dst cannot change
  Fetch fetch = t.fetch;
  const size_t group = ByteRows::first_group(t);
  RowPointers<kRows> words(t.act + ActCodes::words_offset(matrix) + group * sizeof(ActGroupWords),
                           t.act_stride);
  RowPointers<kRows> ends(t.act + ActCodes::ends_offset(matrix) + group * sizeof(ActGroupEnd),
                          t.act_stride);
  ZmmScales<Scales> scales(nullptr);
  for (const char *step = kernel.begin(t), *const end = kernel.end(t); step != end;
       step += Layout::kStepBytes) {
    scales.begin(step);
    if constexpr (!Pairs::kIsDecoded) fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
    pairs.begin_step(step + Scales::kLineBytes);
#pragma GCC unroll 1
    for (size_t i = 0; i < kStepDepth; i += ActGroup::kDepth) {
      __m512 first[kRows][2];
      unroll<kActShare<Scales>>([&]<size_t part>() __attribute__((always_inline)) {
        multiply_group_of_words<Scales, Pairs, kRows, part>(pairs, words, ends, scales, first, t,
                                                            fetch);
        scales.advance();
      });
      ends.advance(sizeof(ActGroupEnd));
    }
  }
}

template <class Layout>
class WordsKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;

 public:
  static constexpr size_t kMr = 12;
  // Decoding a line takes about as long as one product.
  static constexpr size_t kLineProducts = kLinePairs + 1;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_words<Layout, CodedPairs, kRows>; });

  explicit WordsKernel(const ktk_matmul* mm) : Base(mm), matrix_(mm->matrix) {}

  void tile(const Tile& t) const { kTiles[t.rows](*this, matrix_, CodedPairs(), t); }

 private:
  const ktk_matrix* matrix_;
};

template <class Layout>
class DecodedWordsKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;

 public:
  static constexpr size_t kMr = 12;
  static constexpr size_t kLineProducts = kLinePairs;
  static constexpr size_t kStepScratch = kLinePairs * Layout::kCodeBytes;
  static constexpr size_t kRunSlabs = kRunBytes / kStepScratch;
  static constexpr bool kFetchesNextRun = true;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_words<Layout, DecodedPairs, kRows>; });

  explicit DecodedWordsKernel(const ktk_matmul* mm)
      : Base(mm), matrix_(mm->matrix), scratch_(static_cast<char*>(mm->scratch)) {}

  void prepare_run(const Run& run) const {
    const WordLookup lookup;
    char* out = scratch_;
    for (const char *line = this->begin(run), *const end = this->end(run); line != end;) {
      const char* const step_end = line + Layout::kStepBytes;
      for (line += Layout::Scales::kLineBytes; line != step_end; line += 2 * kLine) {
        out = decode(lookup, line, out);
      }
    }
  }

  void tile(const Tile& t) const {
    Tile decoded = t;
    // What is fetched beside every pair of k, of codes and scales: all of a step.
    decoded.fetch.step = ceil_div(t.fetch.step * Layout::kStepBytes / kLine, kStepDepth / 2);
    kTiles[t.rows](*this, matrix_, DecodedPairs{scratch_}, decoded);
  }

 private:
  const ktk_matrix* matrix_;
  char* scratch_;
};

inline size_t decoded_words_size(const ktk_matrix*, size_t) { return kRunBytes; }

}  // namespace
}  // namespace ktk::mxfp4
