// The product on vector registers, for any instruction set that says how four products are summed.
//
//   one tile: kRows rows of act x kVecs vectors of columns; 8 deep a step
//
//                     weights v0    v1                 accumulators, one slab
//   act row 0   k0 k2 k4 k6  x  low   low
//               k1 k3 k5 k7  x  high  high     ->      acc[0][0]  acc[0][1]
//   act row 1   k0 k2 k4 k6  x  low   low
//     :         (broadcast)                              :
//
// Words hold the sums of a depth of 32. Where slabs are deeper, words are added to dwords in memory
// as often, so that floats are made of a slab once.
//
// Every tile of rows splits the nibbles in registers again: six instructions beside up to 48
// products, and on other ports. Bytes split once would take twice the L1.
#pragma once

#include "codec/int4/kernel.h"

namespace ktk::int4 {
namespace {

template <class Dot, size_t kRows, size_t kVecs>
inline void add_step(typename Dot::Int (&acc)[kRows][kVecs], const char* weight,
                     const RowPointers<kRows>& act) {
  constexpr size_t kAtOnce = kRows < kVecs ? 1 : kVecs;  // vectors of weights in registers
#pragma GCC unroll 4
  for (size_t first = 0; first < kVecs; first += kAtOnce) {
    typename Dot::Int low[kAtOnce], high[kAtOnce];
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      const auto codes = Dot::load_bytes(weight + (first + v) * Dot::kLanes * 4);
      low[v] = Dot::low_nibbles(codes);
      high[v] = Dot::high_nibbles(codes);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
      const uint8_t* a = reinterpret_cast<const uint8_t*>(act.row(i));
      const auto even = Dot::broadcast(a);
#pragma GCC unroll 4
      for (size_t v = 0; v < kAtOnce; ++v) Dot::dot(acc[i][first + v], low[v], even);
      const auto odd = Dot::broadcast(a + 4);
#pragma GCC unroll 4
      for (size_t v = 0; v < kAtOnce; ++v) Dot::dot(acc[i][first + v], high[v], odd);
    }
  }
}

// Words to dwords, and words begin anew.
template <class Dot, size_t kRows, size_t kVecs>
inline void widen(typename Dot::Int (&acc)[kRows][kVecs], typename Dot::Int* dwords) {
#pragma GCC unroll 16
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVecs; ++v, ++dwords) {
      *dwords = Dot::add(Dot::finish(acc[i][v]), *dwords);
      acc[i][v] = Dot::set1_int(0);
      pin(acc[i][v]);
    }
  }
}

// What accumulators hold: all of a slab, or words to be added to its dwords.
enum class Holds { kSlab, kPart };

// `kVecs` vectors of columns, from the block's number `column` on.
template <class Dot, Zeros kZeros, Holds kHolds, size_t kRows, size_t kVecs>
inline void multiply_columns(const Operands& operands, const Tile& tile, size_t column,
                             Fetch& shared_fetch) {
  // Copies that stores to dst cannot change.
  const Operands o = operands;
  const Tile t = tile;
  Fetch fetch = shared_fetch;
  constexpr size_t kCols = kVecs * Dot::kLanes;
  constexpr size_t kStepLines = kCols * kStepBytes / kNr / kLine;
  constexpr bool kParts = kHolds == Holds::kPart, kDwords = kParts || Dot::kSums == Sums::kI32;
  constexpr Correction kCorrection =
      kZeros == Zeros::kFixed && kDwords ? Correction::kAtStart : Correction::kNow;
  constexpr size_t kPartBytes = kI16Depth / kStepDepth * kStepBytes;
  alignas(kLine) typename Dot::Int dwords[kParts ? kRows * kVecs : 1];
  float* const first_dst = t.dst + column;
  if (t.is_first()) clear<Dot, kCols>(first_dst, t.dst_stride, kRows);
  RowPointers<kRows> act(t.act + t.begin * o.slab_depth, t.act_stride);
  const char* act_scales = t.act + o.act_scales + t.begin * sizeof(ActScale);
  const char* header = t.block + o.header(t.begin);
  const char* weight = t.block + o.offset(t.begin);
  size_t in_group = t.begin % o.slabs_in_group;
  for (size_t slab = t.begin; slab < t.end; ++slab) {
    if (in_group == 0) {
      header = weight;
      weight += o.header_bytes;
      if (column == 0) {
        for (size_t i = 0; i < o.header_bytes; i += kLine) fetch.next();
      }
    }
    typename Dot::Int acc[kRows][kVecs];
    const char* row_scales = hidden(act_scales);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i, row_scales += t.act_stride) {
      const auto* a = reinterpret_cast<const ActScale*>(row_scales);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) {
        const auto start =
            kCorrection == Correction::kAtStart ? Dot::set1_int(a->correction) : Dot::set1_int(0);
        if constexpr (kParts) Dot::store_bytes(hidden(dwords) + i * kVecs + v, start);
        acc[i][v] = kParts ? Dot::set1_int(0) : start;
        pin(acc[i][v]);
      }
    }
    const char* codes = weight + 4 * column;
    weight += o.slab_bytes;
    const char* const slab_end = codes + o.slab_bytes;
    const char* end = kParts ? codes + kPartBytes : slab_end;
    for (;; end += kPartBytes) {
      do {
#pragma GCC unroll 2
        for (size_t i = 0; i < kStepLines; ++i) fetch.next();
        add_step<Dot>(acc, codes, act);
        act.advance(kStepDepth);
        act.forget_rows();
        codes += kStepBytes;
      } while (codes != end);
#pragma GCC unroll 16
      for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (size_t v = 0; v < kVecs; ++v) pin(acc[i][v]);
      }
      if (!kParts || end == slab_end) break;
      widen<Dot>(acc, hidden(dwords));
    }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(header) + column;
    WeightScales<Dot, kZeros> kept[kVecs];
    if constexpr (kRows > 1) {
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) kept[v].load(scales + v * Dot::kLanes, o.f16_scales);
    }
    row_scales = hidden(act_scales);
    const auto* const before = kParts ? hidden(dwords) : dwords;
    float* dst = hidden(first_dst);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i, row_scales += t.act_stride, dst += t.dst_stride) {
      const auto* a = reinterpret_cast<const ActScale*>(row_scales);
      const auto act_scale = Dot::set1(a->scale);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) {
        if constexpr (kRows == 1) kept[v].load(scales + v * Dot::kLanes, o.f16_scales);
        auto sum = Dot::finish(acc[i][v]);
        if constexpr (kParts) sum = Dot::add(sum, before[i * kVecs + v]);
        add_slab<Dot, kZeros, kCorrection>(dst + v * Dot::kLanes, sum, a, act_scale, kept[v]);
      }
    }
    act_scales += sizeof(ActScale);
    if (++in_group == o.slabs_in_group) in_group = 0;
  }
  shared_fetch = fetch;
}

template <class Dot, Zeros kZeros, Holds kHolds, size_t kRows, size_t kVecs>
void multiply_tile(const Operands& operands, const Tile& tile) {
  Fetch fetch = tile.fetch;
#pragma GCC unroll 1
  for (size_t column = 0; column < kNr; column += kVecs * Dot::kLanes) {
    multiply_columns<Dot, kZeros, kHolds, kRows, kVecs>(operands, tile, column, fetch);
  }
}

// Tiles of up to kMaxRows x kVecs vectors.
template <class Dot, class Act, size_t kMaxRows, size_t kVecs, Zeros kZeros, Holds kHolds>
struct VectorKernel : KernelBase<Act> {
  using KernelBase<Act>::KernelBase;
  static constexpr size_t kMr = kMaxRows;
  static constexpr size_t kLineProducts = 2 * 16 / Dot::kLanes;
  static constexpr auto kTiles = row_table<kMr>(
      []<size_t kRows> { return &multiply_tile<Dot, kZeros, kHolds, kRows, kVecs>; });

  static size_t passes(size_t) { return kNr / (kVecs * Dot::kLanes); }
  void tile(const Tile& t) const { kTiles[t.rows](this->operands_, t); }
};

template <class Dot, class Act, size_t kMaxRows, size_t kVecs, Zeros kZeros>
void gemm_zeros(const ktk_matmul* mm) {
  if constexpr (Dot::kSums == Sums::kI16 && Act::kMaxSlab > kI16Depth) {
    if (Act::slab_depth(mm->matrix) > kI16Depth) {
      return gemm<VectorKernel<Dot, Act, kMaxRows, kVecs, kZeros, Holds::kPart>>(mm);
    }
  }
  gemm<VectorKernel<Dot, Act, kMaxRows, kVecs, kZeros, Holds::kSlab>>(mm);
}

template <class Dot, class Act, size_t kMaxRows, size_t kVecs>
void gemm_vector(const ktk_matmul* mm) {
  if constexpr (Act::kZeroPoints == ZeroPoints::kPossibly) {
    if (has_zeros(mm->matrix)) return gemm_zeros<Dot, Act, kMaxRows, kVecs, Zeros::kStored>(mm);
  }
  gemm_zeros<Dot, Act, kMaxRows, kVecs, Zeros::kFixed>(mm);
}

}  // namespace
}  // namespace ktk::int4
