// One tile of the product: kRows rows of act x kVectors registers of columns, unit by unit.
//
//                  weight v0   v1          int32 sums over a unit, or over half of one
//   act row 0  k0..k3  x  |    |     ->    acc[0][0]  acc[0][1]
//   act row 1  k0..k3  x  |    |     ->    acc[1][0]  acc[1][1]
//     :      (broadcast)                     :
//
// and at the end of each unit, in this order in every micro-kernel, with a = act scale:
//
//   one group      dst = fma(float(sum) * a, scale, dst)         then, with minima,
//                  dst = fma(a * (sum of act codes), min, dst)
//   two groups     t   = float(sum 0) * scale 0
//                  t   = fma(float(sum 1), scale 1, t)           then, with minima,
//                  t   = fma(sum of act codes 0, min 0, t), and the same for 1
//                  dst = fma(t, a, dst)
//
// or, where two units meet the same a, at the end of the second:
//
//   one group      t   = fma(float(sum of the second), its scale, float(sum) * scale)
//                  dst = fma(t, a, dst)                          then the minima of both
//   two groups     t   goes on from the first unit to the second
//                  dst = fma(t, a, dst)
//
// Sums are exact, so a row has the same bits whichever tile it is in. Every tile decodes codes as
// it goes: that takes instructions for which other ports have time, and no memory but the run
// itself, which stays in L1 for all rows. Many rows are different: see gemm_in_regs.h.
#pragma once

#include "gemm/weight_stream.h"
#include "llamafile/codes.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

struct TileArgs {
  const CodeTable* table;
  const uint8_t* codes;  // of the tile's columns, from the first unit on
  size_t gap;            // a tile that holds dst: bytes between the codes of runs
  const float* params;   // scales and minima of the tile's columns, from the first unit on
  size_t units;
  const uint8_t* act;      // codes of the tile's first row, from the first unit on
  const uint8_t* factors;  // scales of the tile's first row, from the first unit on
  size_t act_stride;       // bytes between rows, of codes and of scales
  float* dst;
  size_t dst_stride;
  // What the tile fetches: as many lines as it reads codes from, prefetch_step bytes apart.
  const uint8_t* prefetch;
  size_t prefetch_step;
  // A tile that holds dst:
  size_t unit_lines;   // instead of prefetch_step: so many adjacent lines in every unit
  bool is_first;       // dst has nothing yet
  const float* run_d;  // not NULL: sums of a run are kept apart, then dst += d * sum (run_sums.h)
};

// The same pointer, but gcc 12 does not know: it would compute the address of every row before the
// loops, and spill them.
template <class T>
inline T* hidden(T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// Keeps an accumulator apart from its neighbours, which gcc 12 would otherwise merge and split
// again.
template <class Register>
inline void pin(Register& x) {
  asm("" : "+x"(x));
}

// Adds the products of a unit, step by step: codes are read in the order of memory.
template <size_t kStep, int kBits, bool kHeld, class AnyCodes, int kRows, int kGroups>
[[gnu::always_inline]] inline void add_steps(Dot::Int (&acc)[kGroups][kRows][kVectors],
                                             const AnyCodes& codes, const uint8_t* unit,
                                             const uint8_t* const* act, size_t act_stride,
                                             const uint8_t*& prefetch, size_t prefetch_step) {
  constexpr size_t kLines = kBits * kTileNr * 4 / kLine;  // of a unit
  constexpr size_t kToFetch = kLines * (kStep + 1) / kSteps - kLines * kStep / kSteps;
#pragma GCC unroll 2
  for (size_t i = 0; i < (kHeld ? 0 : kToFetch); ++i, prefetch += prefetch_step) {
    prefetch_l2(prefetch);
  }
  Dot::Int operand[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    operand[v] = codes.template operand<kStep>(unit + v * sizeof(Dot::Int));
    if constexpr (kBits == 8 && kGroups == 2) pin(operand[v]);  // loaded once, not for every row
  }
  auto& sums = acc[kStep * kGroups / kSteps];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Dot::Int four = Dot::broadcast_row<4 * kStep>(act[r / 3], act_stride, r % 3);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot::dot(sums[r][v], operand[v], four);
  }
  if constexpr (kStep + 1 < kSteps) {
    add_steps<kStep + 1, kBits, kHeld>(acc, codes, unit, act, act_stride, prefetch, prefetch_step);
  }
}

// What is an operand for a tile: the table of a code, moved by kWeightOffset, or the code itself.
// That saves an instruction for each, where all types of a shape are linear and have the same
// offset: none where there are minima.
template <int kBits, class Shape>
struct TileCodes {
  static constexpr bool kCentred = Dot::kWeightOffset != 0 && (kBits == 5 || kBits == 6);
  static constexpr bool kPlain = Shape::kMins || kCentred;
  // Sums are too large by kOffset * (sum of the act codes).
  static constexpr int kOffset = Shape::kMins ? 0 : kPlain ? 1 << (kBits - 1) : Dot::kWeightOffset;
  using Type = Codes<kBits, Dot::kWeightOffset, kPlain>;

  static constexpr bool fits(const BlockType& type) {
    const bool is_meant = type.bits == kBits && type.has_dmin == Shape::kMins;
    return !is_meant || !kPlain || (type.linear && type.offset == kOffset);
  }
  static constexpr bool fits_all() {
    for (const BlockType& type : kTypes) {
      if (!fits(type)) return false;
    }
    return true;
  }
};

// Where the sums of a unit start: at -kOffsetOfCodes * (sum of the act codes).
template <int kOffsetOfCodes, int kRows, int kGroups>
[[gnu::always_inline]] inline void start_sums(Dot::Int (&acc)[kGroups][kRows][kVectors],
                                              const uint8_t* factor, size_t act_stride) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, factor += act_stride) {
    const ActGroup* f = reinterpret_cast<const ActGroup*>(factor);
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      Dot::Int start = Dot::set1_int(0);
      if constexpr (kOffsetOfCodes) {
        start = Dot::set1_int(f->comp[g]);
        if constexpr (kGroups == 1) start = Dot::add(start, Dot::set1_int(f->comp[1]));
        if constexpr (kOffsetOfCodes != kOffset) {
          start = Dot::divide_int<__builtin_ctz(kOffset / kOffsetOfCodes)>(start);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        acc[g][r][v] = start;
        pin(acc[g][r][v]);
      }
    }
  }
}

// dst = sums of a run * d, added to what is there unless there is nothing yet.
template <int kRows>
[[gnu::always_inline]] inline void end_run(const Dot::Float (&sums)[kRows][kVectors],
                                           const float* d, bool is_first, float* dst,
                                           size_t dst_stride) {
  Dot::Float of_columns[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) of_columns[v] = Dot::load(d + v * Dot::kLanes);
  dst = hidden(dst);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, dst += dst_stride) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = dst + v * Dot::kLanes;
      Dot::Float before = Dot::set1(0);
      if (!is_first) before = Dot::load(to);
      Dot::store(to, Dot::fma(sums[r][v], of_columns[v], before));
    }
  }
}

// kHeld: dst, or the sum of a run, is in registers from the first unit to the last.
template <int kBits, class Shape, int kRows, bool kHeld>
void multiply_tile(const TileArgs& args) {
  using Int = Dot::Int;
  using Float = Dot::Float;
  constexpr int kGroups = Shape::kHalves ? 2 : 1;
  constexpr int kSpan = Shape::kPairs ? 2 : 1;  // units that meet one act scale
  // Every third row has a pointer, the two behind it are reached through the index register.
  constexpr int kPointers = (kRows + 2) / 3;
  const TileArgs t = args;  // a copy that stores to dst cannot change
  static_assert(TileCodes<kBits, Shape>::fits_all());
  const typename TileCodes<kBits, Shape>::Type operands(*t.table);
  const uint8_t* act[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) act[i] = t.act + 3 * i * t.act_stride;
  const uint8_t* codes = t.codes;
  const uint8_t* prefetch = t.prefetch;
  const uint8_t* factors = t.factors;
  const float* params = t.params;
  Float held[kRows][kVectors];
  if constexpr (kHeld) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        held[r][v] = Dot::set1(0);
        if (!t.is_first && !t.run_d) {
          held[r][v] = Dot::load(t.dst + r * t.dst_stride + v * Dot::kLanes);
        }
      }
    }
  }
  // What the first unit of a pair comes to: in registers if they suffice, which is for gcc to say.
  Float first[kRows][kVectors];
  for (size_t unit = 0; unit < t.units; unit += kSpan) {
#pragma GCC unroll 2
    for (int of_span = 0; of_span < kSpan; ++of_span) {
      const bool is_last = of_span + 1 == kSpan;
      Int acc[kGroups][kRows][kVectors];
      start_sums<TileCodes<kBits, Shape>::kOffset>(acc, hidden(factors), t.act_stride);
      if constexpr (kHeld) {
        for (size_t i = 0; i < t.unit_lines; ++i, prefetch += kLine) prefetch_l2(prefetch);
      }
      add_steps<0, kBits, kHeld>(acc, operands, codes, act, t.act_stride, prefetch,
                                 t.prefetch_step);
#pragma GCC unroll 4
      for (int i = 0; i < kPointers; ++i) act[i] = hidden(act[i] + kSubBlock);
      codes += kBits * kPlaneBytes;
      if (kHeld && is_last) codes += (unit + kSpan) % kSubBlocks == 0 ? t.gap : 0;
      // Scales, then minima: in registers if there are enough of them.
      constexpr int kKept = Shape::kHalves && Shape::kMins ? 0 : 2;
      Float kept[2][kVectors];
#pragma GCC unroll 2
      for (int i = 0; i < kKept; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          if (i * kNr < Shape::kParams) kept[i][v] = Dot::load(params + i * kNr + v * Dot::kLanes);
        }
      }
      const auto param = [&](int i, int v) __attribute__((always_inline)) {
        return kKept ? kept[i][v] : Dot::load(params + i * kNr + v * Dot::kLanes);
      };
      const uint8_t* factor = hidden(factors);
      float* dst = hidden(t.dst);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r, factor += t.act_stride, dst += t.dst_stride) {
        const ActGroup* f = reinterpret_cast<const ActGroup*>(factor);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          pin(acc[0][r][v]);
          Float value = Dot::convert(acc[0][r][v]);
          if constexpr (Shape::kPairs || Shape::kHalves) {
            value = of_span == 0 ? Dot::mul(value, param(0, v))
                                 : Dot::fma(value, param(0, v), first[r][v]);
          } else {
            value = Dot::mul(value, Dot::set1(f->scale));
          }
          if constexpr (Shape::kHalves) {
            value = Dot::fma(Dot::convert(acc[1][r][v]), param(1, v), value);
            if constexpr (Shape::kMins) {
              value = Dot::fma(Dot::convert(Dot::set1_int(f->comp[0])), param(2, v), value);
              value = Dot::fma(Dot::convert(Dot::set1_int(f->comp[1])), param(3, v), value);
            }
          }
          if (!is_last) {
            first[r][v] = value;
            continue;
          }
          float* to = dst + v * Dot::kLanes;
          Float before;
          if constexpr (kHeld) {
            pin(held[r][v]);
            before = held[r][v];
          } else {
            before = Dot::load(to);
          }
          if constexpr (Shape::kPairs || Shape::kHalves) {
            value = Dot::fma(value, Dot::set1(f->scale), before);
          } else {
            value = Dot::fma(value, param(0, v), before);
          }
          if constexpr (Shape::kMins && !Shape::kHalves) {
            if constexpr (Shape::kPairs) {
              const Float min = Dot::load(params + kNr - Shape::kParams + v * Dot::kLanes);
              value = Dot::fma(Dot::set1(f[-1].sum), min, value);
            }
            value = Dot::fma(Dot::set1(f->sum), param(1, v), value);
          }
          if constexpr (kHeld) {
            held[r][v] = value;
          } else {
            Dot::store(to, value);
          }
        }
      }
      factors += sizeof(ActGroup);
      params += Shape::kParams;
    }
    if constexpr (kHeld && Shape::kPairs && Shape::kHalves) {
      if (!t.run_d || (unit + kSpan) % kSubBlocks != 0) continue;
      end_run(held, t.run_d + unit / kSubBlocks * kNr, t.is_first && unit < kSubBlocks, t.dst,
              t.dst_stride);
#pragma GCC unroll 16
      for (auto& row : held) {
#pragma GCC unroll 2
        for (Float& sum : row) sum = Dot::set1(0);
      }
    }
  }
  if constexpr (kHeld) {
    if (t.run_d) return;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Dot::store(t.dst + r * t.dst_stride + v * Dot::kLanes, held[r][v]);
      }
    }
  }
}

using MultiplyTile = void (*)(const TileArgs&);

template <int kBits, class Shape, int kMaxRows, bool kHeld = false>
struct Tiles {
  MultiplyTile of_rows[kMaxRows + 1];

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = multiply_tile<kBits, Shape, kRows, kHeld>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr Tiles() : of_rows{} { fill(); }
};

template <int kBits, class Shape, int kMaxRows, bool kHeld = false>
inline constexpr Tiles<kBits, Shape, kMaxRows, kHeld> kTiles;

}  // namespace
}  // namespace ktk::llamafile
