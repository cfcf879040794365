// One tile of the product: kRows rows of act x kVecs registers of columns, unit by unit.
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
// Sums are exact, so a row has the same bits whichever tile it is in. Weights come from planes of
// codes, which few rows decode as they go, or as operands that were written to scratch for many.
#pragma once

#include "common/weight_stream.h"
#include "llamafile/codes.h"
#include "llamafile/params.h"

namespace ktk::llamafile {
namespace {

struct TileArgs {
  const Meaning* meaning;
  const uint8_t* weight;  // first unit, columns of the tile
  const float* params;    // the same
  size_t units;
  const uint8_t* act;      // first row of the tile, first unit
  const uint8_t* factors;  // the same
  size_t act_stride;
  float* dst;
  size_t dst_stride;
  // Of a tile of operands: in every step it fetches the lines at prefetch and prefetch_half behind
  // it, which then move by prefetch_step.
  const uint8_t* prefetch;
  size_t prefetch_half, prefetch_step;
};

// How far ahead of their use a tile of codes fetches them: it leads the prefetcher of L2.
constexpr size_t kBytesAhead = 512;

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

// Calls use(j, v, operand) for the four steps 4 half + j of every register of columns.
template <int kHalf, class Weights, class Use>
[[gnu::always_inline]] inline void for_each_operand(const Weights& weights, const uint8_t* unit,
                                                    Use use) {
#pragma GCC unroll 2
  for (int v = 0; v < kVecs; ++v) {
    weights.template for_each_step<kHalf>(
        unit + v * sizeof(Dot::Int),
        [&](int j, Dot::Int operand) __attribute__((always_inline)) { use(j, v, operand); });
  }
}

template <class Weights, class Shape, int kRows>
void multiply_tile(const TileArgs& args) {
  using Int = Dot::Int;
  using Float = Dot::Float;
  constexpr bool kDecodes = Weights::kBits > 0;
  // Of codes, or of operands, that a tile passes in a unit.
  constexpr size_t kUnitBytes = kDecodes ? Weights::kBits * kRowBytes : kOperandBytes;
  constexpr size_t kUnitLines = kUnitBytes / kLine * kTileColumns / kColumns;
  constexpr size_t kSlots = kVecs * kUnitSteps;  // operands of a unit
  constexpr int kGroups = Shape::kHalves ? 2 : 1;
  // Every third row has a pointer, the two behind it are reached through the index register.
  constexpr int kPointers = (kRows + 2) / 3;
  const TileArgs t = args;  // a copy that stores to dst cannot change
  const Weights weights(*t.meaning);
  const uint8_t* act[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) act[i] = t.act + 3 * i * t.act_stride;
  const uint8_t* weight = t.weight;
  const uint8_t* prefetch = t.prefetch;
  const uint8_t* factors = t.factors;
  const float* params = t.params;
  for (size_t unit = 0; unit < t.units; ++unit) {
    Int acc[kGroups][kRows][kVecs];
    const uint8_t* factor = hidden(factors);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t.act_stride) {
      const Factor* f = reinterpret_cast<const Factor*>(factor);
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        Int start = Dot::set1_int(0);
        if constexpr (Dot::kWeightOffset) {
          start = Dot::set1_int(f->comp[g]);
          if constexpr (kGroups == 1) start = Dot::add(start, Dot::set1_int(f->comp[1]));
        }
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) {
          acc[g][r][v] = start;
          pin(acc[g][r][v]);
        }
      }
    }
    const auto half = [&]<int kHalf>() __attribute__((always_inline)) {
      const auto add = [&](int j, int v, Int operand) __attribute__((always_inline)) {
        const size_t slot = static_cast<size_t>((kHalf * kVecs + v) * 4 + j);
        if constexpr (kDecodes) {
          const size_t line = slot * kUnitLines / kSlots;
          if (line != (slot + 1) * kUnitLines / kSlots) {
            prefetch_l2(weight + kBytesAhead + line * (kUnitBytes / kUnitLines));
          }
        } else if (v == 0) {
          prefetch_l2(prefetch);
          prefetch_l2(prefetch + t.prefetch_half);
          prefetch += t.prefetch_step;
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          Int& sum = acc[kHalf * (kGroups - 1)][r][v];
          sum = Dot::dot(sum, operand, act[r / 3], t.act_stride, r % 3, j * 4);
        }
      };
      for_each_operand<kHalf>(weights, weight, add);
#pragma GCC unroll 4
      for (int i = 0; i < kPointers; ++i) act[i] = hidden(act[i] + kUnit / 2);
    };
    half.template operator()<0>();
    half.template operator()<1>();
    weight += kUnitBytes;
    Float param[2 * kGroups][kVecs];  // scales, minima
#pragma GCC unroll 4
    for (int i = 0; i < (Shape::kMins ? 2 : 1) * kGroups; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) param[i][v] = Dot::load(params + i * 32 + v * Dot::kLanes);
    }
    factor = hidden(factors);
    float* dst = hidden(t.dst);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t.act_stride, dst += t.dst_stride) {
      const Factor* f = reinterpret_cast<const Factor*>(factor);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        pin(acc[0][r][v]);
        Float value = Dot::convert(acc[0][r][v]);
        float* to = dst + v * Dot::kLanes;
        if constexpr (Shape::kHalves) {
          value = Dot::mul(value, param[0][v]);
          value = Dot::fma(Dot::convert(acc[1][r][v]), param[1][v], value);
          if constexpr (Shape::kMins) {
            value = Dot::fma(Dot::convert(Dot::set1_int(f->comp[0])), param[2][v], value);
            value = Dot::fma(Dot::convert(Dot::set1_int(f->comp[1])), param[3][v], value);
          }
          value = Dot::fma(value, Dot::set1(f->scale), Dot::load(to));
        } else {
          value = Dot::mul(value, Dot::set1(f->scale));
          value = Dot::fma(value, param[0][v], Dot::load(to));
          if constexpr (Shape::kMins) value = Dot::fma(Dot::set1(f->sum), param[1][v], value);
        }
        Dot::store(to, value);
      }
    }
    factors += sizeof(Factor);
    params += Shape::kParams;
  }
}

using MultiplyTile = void (*)(const TileArgs&);

template <class Weights, class Shape, int kMaxRows>
struct Tiles {
  MultiplyTile of_rows[kMaxRows + 1];

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = multiply_tile<Weights, Shape, kRows>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr Tiles() : of_rows{} { fill(); }
};

template <class Weights, class Shape, int kMaxRows>
inline constexpr Tiles<Weights, Shape, kMaxRows> kTiles;

}  // namespace
}  // namespace ktk::llamafile
