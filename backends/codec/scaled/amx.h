// The product of the layouts of layout.h with AMX: bf16 rows, tdpbf16ps for any number of rows, in
// the 2 x 2 scheme of gemm/amx.h.
//
// A run of 256 k is decoded into scratch as B tiles, 16 KiB that stay in L1 while all rows pass
// them. Powers of two are exact factors of bf16, and so are E4M3 scales of E2M1 codes, whose
// products have six bits: decoding applies them, and sums stay in tiles for the whole run. Any
// other scale waits for the sum of its group: tiles can only leave through memory, so sums are
// stored to scratch and added to dst from there.
#pragma once

#include <immintrin.h>

#include "codec/scaled/zmm.h"
#include "gemm/amx.h"

namespace ktk {
namespace {

constexpr size_t kTileDepth = 32;
constexpr size_t kAmxRunDepth = 256;

struct AmxScratch {
  // [32 k][half] B tiles, then the sums of 32 rows x 32 columns.
  char weights[kAmxRunDepth / kTileDepth][2][kAmxTileBytes];
  float sums[2 * kAmxRows][kBlockCols];
};

inline size_t amx_scratch_size(const ktk_matrix*, size_t) { return sizeof(AmxScratch); }

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

// Decodes the steps [begin, end) to B tiles.
template <class Decoder, class Layout>
inline void decode_tiles(const char* begin, const char* end, Fetch fetch, char* tiles) {
  using Scales = typename Layout::Scales;
  constexpr size_t kTileLines = kTileDepth / Layout::kLineDepth;
  constexpr size_t kGroupLines = Scales::kGroupDepth / Layout::kLineDepth;
  const Decoder decoder;
  for (const char* line = begin; line != end;) {
    const char* step_end = line + Layout::kStepBytes;
    ZmmScales<Scales> scales(nullptr);
    scales.begin(line);
    if constexpr (Scales::kLineBytes) {
      fetch.template next_of<Scales::kLineBytes / kLine>();
      line += Scales::kLineBytes;
    }
    for (; line != step_end; tiles += 2 * kAmxTileBytes) {
      __m512 scale[2] = {};
      for (size_t i = 0; i < kTileLines; ++i) {
        if (Scales::kLineBytes && i % kGroupLines == 0) {
          scale[0] = scales.load(0);
          scale[1] = scales.load(1);
          scales.advance();
        }
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half, line += kLine) {
          fetch.next();
          const typename Decoder::Line codes = decoder.load(line);
          char* out = tiles + half * kAmxTileBytes + i * Decoder::kVectors * kLine;
#pragma GCC unroll 4
          for (size_t v = 0; v < Decoder::kVectors; ++v) {
            __m512i pairs = decoder.vector(codes, v);
            if constexpr (Scales::kLineBytes) pairs = scale_pairs(pairs, scale[half]);
            _mm512_store_si512(out + v * kLine, pairs);
          }
        }
      }
    }
  }
  tile_memory_barrier();
}

// Adds the products of 32 (or 16) rows and `count` tiles of depth.
template <bool kBothHalves>
inline void add_run(const char* act, size_t act_stride, const char* weights, size_t count) {
  for (size_t i = 0; i < count; ++i, act += kLine, weights += 2 * kAmxTileBytes) {
    add_tiles<TilesBf16, kBothHalves>(act, act_stride, weights, kAmxTileBytes);
  }
}

template <class Decoder, class Layout>
class AmxKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;
  using Scales = typename Layout::Scales;

 public:
  static constexpr size_t kMr = 2 * kAmxRows;
  static constexpr size_t kRowStep = kAmxRows;
  static constexpr size_t kLineProducts = 1;
  static constexpr size_t kRunSlabs = kAmxRunDepth / Base::kSlabDepth;

  explicit AmxKernel(const ktk_matmul* mm)
      : Base(mm), scratch_(static_cast<AmxScratch*>(mm->scratch)) {}

  void begin_run(const Run& run, Fetch fetch) const {
    decode_tiles<Decoder, Layout>(this->begin(run), this->end(run), fetch, scratch_->weights[0][0]);
  }

  void tile(const Tile& t) const {
    if (t.rows <= kAmxRows) {
      multiply_tile<false>(t);
    } else {
      multiply_tile<true>(t);
    }
  }

 private:
  template <bool kBothHalves>
  void multiply_tile(const Tile& t) const {
    const char* act = this->template act<sizeof(uint16_t)>(t);
    const size_t count =
        (this->end(t) - this->begin(t)) / Layout::kStepBytes * (kStepDepth / kTileDepth);
    if constexpr (Scales::kLineBytes) {
      load_sums<kBothHalves>(t.dst, t.dst_stride);
      add_run<kBothHalves>(act, t.act_stride, scratch_->weights[0][0], count);
      store_sums<kBothHalves>(t.dst, t.dst_stride);
    } else {
      constexpr size_t kGroupTiles = Scales::kGroupDepth / kTileDepth;
      ZmmScales<Scales> scales(this->scales(t));
      for (size_t at = 0; at < count; at += kGroupTiles, act += kGroupTiles * kLine) {
        zero_sums<kBothHalves>();
        add_run<kBothHalves>(act, t.act_stride, scratch_->weights[at][0],
                             smaller(kGroupTiles, count - at));
        store_sums<kBothHalves>(scratch_->sums, kBlockCols);
        add_scaled(t, scales);
        scales.advance();
      }
    }
  }

  // dst += scale * sum, of a group.
  void add_scaled(const Tile& t, const ZmmScales<Scales>& scales) const {
    const __m512 scale[2] = {scales.load(0), scales.load(1)};
    float* dst = t.dst;
    for (size_t i = 0; i < t.rows; ++i, dst += t.dst_stride) {
      for (size_t half = 0; half < 2; ++half) {
        float* to = dst + half * kHalfCols;
        const __m512 sum = _mm512_load_ps(scratch_->sums[i] + half * kHalfCols);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, scale[half], _mm512_loadu_ps(to)));
      }
    }
  }

  AmxScratch* scratch_;
};

}  // namespace
}  // namespace ktk
