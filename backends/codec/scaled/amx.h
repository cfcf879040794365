// The product of the layouts of layout.h with AMX: bf16 rows, tdpbf16ps for any number of rows, in
// the 2 x 2 scheme of gemm/amx.h.
//
// A run of 256 k is decoded into scratch as B tiles, 16 KiB that stay in L1 while all rows pass
// them; up to 32 rows a group or a step of 64 k, which is decoded while tiles multiply the one
// before. Powers of two are exact factors of bf16, and so are E4M3 scales of E2M1 codes, whose
// products have six bits: decoding applies them, and sums stay in tiles for the whole run. Any
// other scale waits for the sum of its group: tiles can only leave through memory, so sums are
// stored to scratch and added to dst from there, between the products of the next group.
#pragma once

#include <immintrin.h>

#include "codec/scaled/zmm.h"
#include "gemm/amx.h"

namespace ktk {
namespace {

constexpr size_t kTileDepth = 32;
constexpr size_t kAmxRunDepth = 256;

struct AmxScratch {
  // [32 k][half] B tiles, then 32 rows x 32 columns of sums: those that are stored, and those that
  // were before.
  char weights[kAmxRunDepth / kTileDepth][2][kAmxTileBytes];
  float sums[2][2 * kAmxRows][kNr];
};

inline size_t amx_scratch_size(const ktk_matrix*, size_t) { return sizeof(AmxScratch); }

// While one of these exists, f32 operations of this thread round as tdpbf16ps does: to nearest
// even, with subnormal operands and results for zero.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};

// Pairs of bf16 times the scales of their columns: exact within the range of normal numbers. The
// instruction takes smaller ones for zero; larger ones are infinite.
inline __m512i scale_pairs(__m512i pairs, __m512 scale) {
  const __m512i odd_mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 even = _mm512_castsi512_ps((__m512i)((__v16su)pairs << 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, odd_mask));
  const __m512i low = (__m512i)((__v16su)_mm512_castps_si512(_mm512_mul_ps(even, scale)) >> 16);
  const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
  return _mm512_ternarylogic_epi32(odd_mask, high, low, 0xca);  // mask ? high : low
}

// What decoding does with the scales of 16 columns: nothing, where sums are scaled;
struct NoFactor {
  template <class Scales>
  static NoFactor of(const Scales&, size_t) {
    return {};
  }
  static __m512i times(__m512i pairs) { return pairs; }
};

// multiply;
struct Factor {
  __m512 scale;

  template <class Scales>
  static Factor of(const Scales& scales, size_t half) {
    return {scales.load(half)};
  }
  __m512i times(__m512i pairs) const { return scale_pairs(pairs, scale); }
};

// or add exponents, if all products are normal numbers: two cycles where multiplying takes four.
struct Power {
  __m512i exponents;  // for either half of a pair

  static Power of(const ZmmScales<MxScales>& scales, size_t half) {
    const auto* bytes = reinterpret_cast<const __m128i*>(scales.line + half * kHalfCols);
    const __m512i biased = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes));
    const __m512i both = _mm512_or_si512(biased, _mm512_slli_epi32(biased, 16));
    return {_mm512_slli_epi16(_mm512_sub_epi16(both, _mm512_set1_epi16(127)), 7)};
  }
  __m512i times(__m512i pairs) const {
    const __mmask32 not_zero = _mm512_test_epi16_mask(pairs, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_add_epi16(pairs, not_zero, pairs, exponents);
  }
  // Whether that is so with all scales of a line.
  template <class Decoder>
  static bool suits(const char* line) {
    constexpr int kLeast = 128 - Decoder::kLeastExponent, kMost = 381 - Decoder::kMostExponent;
    const __m512i least = _mm512_set1_epi8(static_cast<char>(kLeast));
    const __m512i range = _mm512_set1_epi8(static_cast<char>(kMost - kLeast));
    return !_mm512_cmpgt_epu8_mask(_mm512_sub_epi8(_mm512_load_si512(line), least), range);
  }
};

// Decodes the lines of a step to B tiles. By: NoFactor, Factor or Power.
template <class By, class Layout, class Decoder>
inline void decode_step(const Decoder& decoder, const char* line,
                        ZmmScales<typename Layout::Scales> scales, Fetch& fetch, char* tiles) {
  using Scales = typename Layout::Scales;
  constexpr size_t kTileLines = kTileDepth / Layout::kLineDepth;
  constexpr size_t kGroupLines = Scales::kGroupDepth / Layout::kLineDepth;
  for (const char* end = line + Layout::kCodeBytes; line != end; tiles += 2 * kAmxTileBytes) {
    By factor[2];
    for (size_t i = 0; i < kTileLines; ++i) {
      if (Scales::kLineBytes && i % kGroupLines == 0) {
        factor[0] = By::of(scales, 0);
        factor[1] = By::of(scales, 1);
        scales.advance();
      }
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; ++half, line += kLine) {
        fetch.next();
        const typename Decoder::Line codes = decoder.load(line);
        char* out = tiles + half * kAmxTileBytes + i * Decoder::kVectors * kLine;
#pragma GCC unroll 4
        for (size_t v = 0; v < Decoder::kVectors; ++v) {
          _mm512_store_si512(out + v * kLine, factor[half].times(decoder.vector(codes, v)));
        }
      }
    }
  }
}

template <class Scales>
constexpr bool kArePowers = false;
template <>
constexpr bool kArePowers<MxScales> = true;

// How f32 is rounded beside tiles: as they do where sums are scaled; where scales meet codes, of
// which the least is subnormal, exactly.
template <class Scales, bool kMeetCodes = Scales::kLineBytes != 0>
struct RoundingBesideTiles : FlushSubnormals {};
template <class Scales>
struct RoundingBesideTiles<Scales, true> {};

// Decodes the steps [begin, end) to B tiles.
template <class Decoder, class Layout>
inline void decode_tiles(const char* begin, const char* end, Fetch fetch, char* tiles) {
  using Scales = typename Layout::Scales;
  constexpr size_t kStepTiles = kStepDepth / kTileDepth * 2 * kAmxTileBytes;
  const Decoder decoder;
  for (const char* step = begin; step != end; step += Layout::kStepBytes, tiles += kStepTiles) {
    ZmmScales<Scales> scales(nullptr);
    scales.begin(step);
    const char* codes = step + Scales::kLineBytes;
    if constexpr (!Scales::kLineBytes) {
      decode_step<NoFactor, Layout>(decoder, codes, scales, fetch, tiles);
    } else {
      fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
      if constexpr (kArePowers<Scales>) {
        if (Power::suits<Decoder>(step)) {
          decode_step<Power, Layout>(decoder, codes, scales, fetch, tiles);
          continue;
        }
      }
      decode_step<Factor, Layout>(decoder, codes, scales, fetch, tiles);
    }
  }
  tile_memory_barrier();
}

// Adds the products of 32 (or 16) rows and `count` tiles of depth.
template <bool kBothHalves, class Between = decltype(kNothing)>
inline void add_run(const char* act, size_t act_stride, const char* weights, size_t count,
                    Between between = kNothing) {
  for (size_t i = 0; i < count; ++i, act += kLine, weights += 2 * kAmxTileBytes) {
    add_tiles<TilesBf16, kBothHalves>(act, act_stride, weights, kAmxTileBytes, kLine, between);
  }
}

// Sums of a group that are yet to be scaled and added to dst.
template <class Scales>
struct StoredSums {
  const float (*sums)[kNr] = nullptr;
  size_t rows = 0;
  ZmmScales<Scales> scales = ZmmScales<Scales>(nullptr);
  float* dst = nullptr;
  size_t dst_stride = 0;

  void add(size_t count) {
    count = smaller(count, rows);
    if (count == 0) return;
    const __m512 scale[2] = {scales.load(0), scales.load(1)};
    for (size_t i = 0; i < count; ++i) {
      for (size_t half = 0; half < 2; ++half) {
        float* to = dst + i * dst_stride + half * kHalfCols;
        const __m512 sum = _mm512_load_ps(sums[i] + half * kHalfCols);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, scale[half], _mm512_loadu_ps(to)));
      }
    }
    rows -= count;
    sums += count;
    dst += count * dst_stride;
  }
};

template <class Decoder, class Layout>
class AmxKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;
  using Scales = typename Layout::Scales;

 public:
  static constexpr size_t kMr = 2 * kAmxRows;
  static constexpr size_t kRowStep = kAmxRows;
  static constexpr size_t kLineProducts = 1;
  static constexpr size_t kRunSlabs = kAmxRunDepth / Base::kSlabDepth;
  // A single tile of rows waits for decoding: short runs let the one be done beside the other.
  static constexpr size_t kAloneRunSlabs = 1;

  explicit AmxKernel(const ktk_matmul* mm)
      : Base(mm),
        rows_(mm->m),
        is_alone_(mm->m <= kMr),
        scratch_(static_cast<AmxScratch*>(mm->scratch)) {}
  ~AmxKernel() { stored_.add(kMr); }
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  void begin_run(const Run& run, Fetch fetch) const {
    decode_tiles<Decoder, Layout>(this->begin(run), this->end(run), fetch, scratch_->weights[0][0]);
  }

  void tile(const Tile& t) {
    if (t.rows <= kAmxRows) {
      multiply_tile<false>(t);
    } else {
      multiply_tile<true>(t);
    }
  }

 private:
  template <bool kBothHalves>
  void multiply_tile(const Tile& t) {
    const char* act = this->template act<sizeof(uint16_t)>(t);
    const size_t count =
        (this->end(t) - this->begin(t)) / Layout::kStepBytes * (kStepDepth / kTileDepth);
    if constexpr (Scales::kLineBytes) {
      // Between the runs of a single tile, sums stay where they are.
      if (!is_alone_ || t.is_first()) load_sums<kBothHalves>(t.dst, t.dst_stride);
      add_run<kBothHalves>(act, t.act_stride, scratch_->weights[0][0], count);
      if (!is_alone_ || t.end == this->slabs()) store_sums<kBothHalves>(t.dst, t.dst_stride);
    } else {
      constexpr size_t kGroupTiles = Scales::kGroupDepth / kTileDepth;
      ZmmScales<Scales> scales(this->scales(t));
      constexpr size_t kRowsBetween = ceil_div(kMr, kGroupTiles * kProductsOf<kBothHalves>);
      for (size_t at = 0; at < count; at += kGroupTiles, act += kGroupTiles * kLine) {
        StoredSums<Scales> before = stored_;
        zero_sums<kBothHalves>();
        add_run<kBothHalves>(act, t.act_stride, scratch_->weights[at][0],
                             smaller(kGroupTiles, count - at), [&] { before.add(kRowsBetween); });
        before.add(kMr);  // what a group that is cut short left
        store_sums<kBothHalves>(scratch_->sums[next_], kNr);
        stored_ = {scratch_->sums[next_], t.rows, scales, t.dst, t.dst_stride};
        next_ = 1 - next_;
        scales.advance();
      }
    }
  }

  [[maybe_unused]] RoundingBesideTiles<Scales> rounding_;
  TileRows rows_;
  bool is_alone_;
  AmxScratch* scratch_;
  StoredSums<Scales> stored_;
  size_t next_ = 0;  // half of the scratch that sums are stored to
};

}  // namespace
}  // namespace ktk
