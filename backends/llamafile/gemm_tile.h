// A tile: kRows rows of act x kVectors registers of n, sub-block by sub-block.
//
//                  weight v0   v1          int32 sums of one group
//   act row 0  k0..k3  x  |    |     ->    sum[0][0]  sum[0][1]
//   act row 1  k0..k3  x  |    |     ->    sum[1][0]  sum[1][1]
//     :      (broadcast)                     :
//
// At the end of each sub-block sums meet scales (epilogue.h) and go to C, which is in memory, or in
// registers from the first sub-block of a tile to the last. Sums are exact, so a row has the same
// bits in any tile. Every tile decodes codes as it goes: that takes instructions for which other
// ports have time.
#pragma once

#include "gemm/prefetch.h"
#include "gemm/rows.h"
#include "llamafile/epilogue.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

// What a tile multiplies: sub-blocks that follow each other in k.
struct TileOperands {
  const CodeTable* table;
  const uint8_t* codes;   // first n of the tile, first sub-block
  size_t gap;             // bytes between the codes of two super-blocks
  const float* scales;    // first n of the tile, first sub-block (weight_scales.h)
  const uint8_t* shifts;  // first n of the tile, first sub-block, of kinds that have them
  const float* d;         // deferred ones: first n of the tile, first super-block
  size_t sub_blocks;
  size_t lines_to_fetch;   // in every sub-block, by tiles with C in registers
  const char* act;         // first row, first sub-block
  const char* act_groups;  // ActGroup of the first row, first sub-block
  size_t act_stride;       // bytes between rows, of both
};

// Operands of a tile: table[code] + kWeightOffset, or the code itself, which saves an instruction
// for each step. That can be where all types of a kind are linear with the same offset, none where
// there are minima.
template <Kind kKind>
struct TileCodes {
  static constexpr int kBits = kKind.bits;
  static constexpr bool kMins = has_min(kKind.scaling);
  static constexpr bool kCentered =
      Dot::kWeightOffset != 0 && (kBits == 5 || kBits == 6) && !kKind.has_table;
  static constexpr bool kAsTheyAre = kMins || kCentered;
  // Sums are too large by kOffset * (sum of the act codes).
  static constexpr int kOffset = kMins ? 0 : kAsTheyAre ? 1 << (kBits - 1) : Dot::kWeightOffset;
  using Type = Codes<kBits, kKind.has_table, Dot::kWeightOffset, kAsTheyAre>;

  static constexpr bool fits(const BlockType& type) {
    const bool is_of_kind =
        type.bits == kBits && type.has_dmin == kMins && kind_of(type).has_table == kKind.has_table;
    return !is_of_kind || !kAsTheyAre || (type.linear && type.offset == kOffset);
  }
  static constexpr bool fits_all() {
    for (const BlockType& type : kTypes) {
      if (!fits(type)) return false;
    }
    return true;
  }
};

template <int kRows>
struct CInMemory {
  static constexpr int kRegisters = 0;
  static constexpr bool kFetchesAtOnce = false;
  float* dst;
  size_t stride;
  float* row = nullptr;

  [[gnu::always_inline]] void begin_rows() { row = hidden(dst); }
  [[gnu::always_inline]] void next_row() { row += stride; }
  template <class Finish>
  [[gnu::always_inline]] void update(int, int v, Finish finish) {
    float* to = row + v * Dot::kLanes;
    Dot::store(to, finish(Dot::load(to)));
  }
};

template <int kRows>
struct CInRegisters {
  static constexpr int kRegisters = kRows * kVectors;
  static constexpr bool kFetchesAtOnce = true;  // a part of the next run in every sub-block
  Dot::Float c[kRows][kVectors];

  [[gnu::always_inline]] void begin_rows() {}
  [[gnu::always_inline]] void next_row() {}
  template <class Finish>
  [[gnu::always_inline]] void update(int r, int v, Finish finish) {
    pin(c[r][v]);
    c[r][v] = finish(c[r][v]);
  }
  [[gnu::always_inline]] void load(const float* dst, size_t stride) {
    dst = hidden(dst);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, dst += stride) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) c[r][v] = Dot::load(dst + v * Dot::kLanes);
    }
  }
  [[gnu::always_inline]] void store(float* dst, size_t stride) const {
    dst = hidden(dst);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, dst += stride) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) Dot::store(dst + v * Dot::kLanes, c[r][v]);
    }
  }
  [[gnu::always_inline]] void clear() {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) c[r][v] = Dot::set1(0);
    }
  }
};

template <Kind kKind, int kRows>
class TileLoop {
  static constexpr int kBits = kKind.bits;
  static constexpr Scaling kScaling = kKind.scaling;
  using Int = Dot::Int;
  using Float = Dot::Float;
  using E = Epilogue<kScaling>;
  using Operands = TileCodes<kKind>;
  static_assert(Operands::fits_all());
  static constexpr int kGroups = E::kGroups;

 public:
  [[gnu::always_inline]] TileLoop(const TileOperands& t, const Fetch& fetch)
      : operands_(*t.table),
        codes_(t.codes),
        scales_(t.scales),
        shifts_(t.shifts),
        act_(t.act, t.act_stride),
        act_groups_(t.act_groups),
        fetch_(fetch),
        lines_to_fetch_(t.lines_to_fetch) {}

  const Fetch& fetch() const { return fetch_; }

  // Adds the sub-blocks that share an act scale; then codes are `gap` bytes further on.
  template <class C>
  [[gnu::always_inline]] void add_span(C& c, size_t gap) {
    Float first[kRows][kVectors];  // t of the first of two
#pragma GCC unroll 2
    for (int i = 0; i < E::kSpan; ++i) {
      Int sums[kGroups][kRows][kVectors];
      begin(sums);
      if constexpr (C::kFetchesAtOnce) fetch_.next_lines(lines_to_fetch_);
      add_products<!C::kFetchesAtOnce>(sums);
      act_.advance(kSubBlock);
      act_.forget_rows();
      codes_ += kBits * kPlaneBytes;
      const bool is_last = i + 1 == E::kSpan;
      if (is_last) codes_ += gap;
      add_groups(sums, c, first, i == 0, is_last);
      act_groups_ += sizeof(ActGroup);
      scales_ += num_scales(kScaling);
      if constexpr (kKind.has_shifts) shifts_ += shift_bytes(kScaling);
    }
  }

 private:
  [[gnu::always_inline]] void begin(Int (&sums)[kGroups][kRows][kVectors]) const {
    const char* groups = hidden(act_groups_);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, groups += act_.stride) {
      const ActGroup& group = *reinterpret_cast<const ActGroup*>(groups);
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        const Int start = E::template begin<Operands::kOffset>(group, g);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums[g][r][v] = start;
          pin(sums[g][r][v]);
        }
      }
    }
  }

  // Step by step: codes are read in the order of memory, and for each line of them one is fetched.
  template <bool kFetches>
  [[gnu::always_inline]] void add_products(Int (&sums)[kGroups][kRows][kVectors]) {
    unroll<kSteps>([&]<size_t kStep>() __attribute__((always_inline)) {
      constexpr size_t kLines = kBits * kTileNr * 4 / kLine;  // of a sub-block
      constexpr size_t kToFetch = kLines * (kStep + 1) / kSteps - kLines * kStep / kSteps;
#pragma GCC unroll 2
      for (size_t i = 0; i < (kFetches ? kToFetch : 0); ++i) fetch_.next_unseen();
      // The plane of highest bits is loaded for each step: kept, it would push sums out of
      // registers.
      constexpr bool kFewLeft = sizeof(Int) == 32 || kKind.has_table;
      constexpr bool kSigned = Dot::kWeightOffset == 0;  // takes registers too
      if constexpr ((kBits == 5 && kFewLeft) ||
                    (kBits == 3 && kFewLeft && (kKind.has_shifts || kSigned))) {
        codes_ = hidden(codes_);
      }
      Int operand[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        operand[v] = operands_.template operand<kStep>(codes_ + v * sizeof(Int));
        if constexpr (kKind.has_shifts) {
          constexpr size_t kGroup = kStep * kGroups / kSteps;
          operand[v] = Dot::add_from(operand[v], shifts_ + kGroup * kPlaneBytes + v * sizeof(Int));
        }
        if constexpr (kBits == 8 && kGroups == 2)
          pin(operand[v]);  // loaded once, not for every row
      }
      auto& of_group = sums[kStep * kGroups / kSteps];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Int four = Dot::broadcast_row<kKr * kStep>(act_.pointers[r / 3], act_.stride, r % 3);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          of_group[r][v] = Dot::dot(of_group[r][v], operand[v], four);
        }
      }
    });
  }

  template <class C>
  [[gnu::always_inline]] void add_groups(Int (&sums)[kGroups][kRows][kVectors], C& c,
                                         Float (&first)[kRows][kVectors], bool is_first,
                                         bool is_last) const {
    // In registers if there are enough of them.
    constexpr bool kKept = !(kGroups == 2 && E::kMins);
    Float kept[2][kVectors];
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if (kKept && i * kNr < num_scales(kScaling)) kept[i][v] = load_scale(i, v);
      }
    }
    const char* groups = hidden(act_groups_);
    c.begin_rows();
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, groups += act_.stride, c.next_row()) {
      const ActGroup& act = *reinterpret_cast<const ActGroup*>(groups);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const auto sum = [&](int g)
                             __attribute__((always_inline)) { return Dot::convert(sums[g][r][v]); };
        const auto scale = [&](int g) __attribute__((always_inline)) {
          return kKept ? kept[g][v] : load_scale(g, v);
        };
        const auto min = [&](int g) __attribute__((always_inline)) { return scale(kGroups + g); };
        const auto first_min = [&]() __attribute__((always_inline)) {
          return Dot::load(scales_ + kNr - num_scales(kScaling) + v * Dot::kLanes);
        };
        pin(sums[0][r][v]);
        const Float t = E::add_group(is_first, first[r][v], act, sum, scale, min);
        if (!is_last) {
          first[r][v] = t;
          // More than there are registers: these are needed last.
          constexpr int kSums = kRows * kVectors * (kGroups + 1);
          if constexpr (kSums + C::kRegisters > 32) asm("" : "+m"(first[r][v]));
          continue;
        }
        c.update(r, v, [&](Float before) __attribute__((always_inline)) {
          return E::finish(t, act, before, scale, min, first_min);
        });
      }
    }
  }

  // Scales, then minima.
  [[gnu::always_inline]] Float load_scale(size_t i, int v) const {
    return Dot::load(scales_ + i * kNr + v * Dot::kLanes);
  }

  const typename Operands::Type operands_;
  const uint8_t* codes_;
  const float* scales_;
  const uint8_t* shifts_;
  RowPointers<kRows> act_;
  const char* act_groups_;
  Fetch fetch_;
  const size_t lines_to_fetch_;
};

using GemmTile = void(const TileOperands&, float* dst, size_t dst_stride, bool is_first, Fetch&);

// dst += act x weight, for sub-blocks of one super-block. Deferred d are left out.
template <Kind kKind, int kRows>
void gemm_tile(const TileOperands& operands, float* dst, size_t dst_stride, bool, Fetch& fetch) {
  TileLoop<kKind, kRows> loop(operands, fetch);
  CInMemory<kRows> c = {dst, dst_stride};
  const size_t sub_blocks = operands.sub_blocks;
  for (size_t i = 0; i < sub_blocks; i += act_span(kKind.scaling)) loop.add_span(c, 0);
  fetch = loop.fetch();
}

// dst += act x weight, or dst = act x weight for the first sub-blocks of k, with C in registers.
template <Kind kKind, int kRows>
void gemm_tile_in_registers(const TileOperands& operands, float* dst, size_t dst_stride,
                            bool is_first, Fetch& fetch) {
  constexpr Scaling kScaling = kKind.scaling;
  TileLoop<kKind, kRows> loop(operands, fetch);
  const size_t sub_blocks = operands.sub_blocks;
  CInRegisters<kRows> c;
  if constexpr (defers_d(kScaling)) {
    const float* d = operands.d;
    for (size_t i = 0; i < sub_blocks; i += kSubBlocks, d += kNr) {
      c.clear();
#pragma GCC unroll 1
      for (size_t j = 0; j < kSubBlocks; j += act_span(kScaling)) loop.add_span(c, 0);
      add_deferred(c.c, d, is_first && i == 0, dst, dst_stride);
    }
  } else {
    const size_t gap = operands.gap;
    c.clear();
    if (!is_first) c.load(dst, dst_stride);
    for (size_t i = 0; i < sub_blocks;) {
      i += act_span(kScaling);
      loop.add_span(c, i % kSubBlocks == 0 ? gap : 0);
    }
    c.store(dst, dst_stride);
  }
  fetch = loop.fetch();
}

}  // namespace
}  // namespace ktk::llamafile
