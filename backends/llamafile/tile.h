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

template <class Weights, class Shape, int kRows>
class Tile {
  using Int = Dot::Int;
  using Float = Dot::Float;
  // Every third row has a pointer, the two behind it are reached through the index register.
  static constexpr int kPointers = (kRows + 2) / 3;
  static constexpr bool kDecodes = Weights::kBits > 0;
  // Of codes, or of operands, that a tile passes in a unit.
  static constexpr size_t kUnitBytes = kDecodes ? Weights::kBits * kRowBytes : kOperandBytes;
  static constexpr size_t kUnitLines = kUnitBytes / kLine * kTileColumns / kColumns;

 public:
  static void multiply(const TileArgs& args) {
    Tile tile(args);
    const uint8_t* factors = tile.t_.factors;
    const float* params = tile.t_.params;
#pragma GCC unroll 1
    for (size_t unit = 0; unit < tile.t_.units; ++unit) {
      if constexpr (Shape::kHalves) {
        tile.halves(factors, params);
      } else {
        tile.whole(factors, params);
      }
      tile.weight_ += kUnitBytes;
      factors += sizeof(Factor);
      params += Shape::kParams;
    }
  }

 private:
  explicit Tile(const TileArgs& args)
      : t_(args), weights_(*args.meaning), weight_(args.weight), prefetch_(args.prefetch) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) act_[i] = t_.act + 3 * i * t_.act_stride;
  }

  static const int32_t* comp(const uint8_t* factor) {
    return reinterpret_cast<const Factor*>(factor)->comp;
  }
  static Int set1_int(const int32_t* x) { return Dot::set1_int(*x); }

  template <int kHalf>
  void add_half(Int (&acc)[kRows][kVecs]) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      weights_.template for_each_step<kHalf>(
          weight_ + v * sizeof(Int), [&](int j, Int operand) __attribute__((always_inline)) {
            fetch((kHalf * kVecs + v) * 4 + j);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
              const uint8_t* a = act_[r / 3] + r % 3 * t_.act_stride + j * kStep;
              acc[r][v] = Dot::dot(acc[r][v], operand, a);
            }
          });
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) act_[i] = hidden(act_[i] + kUnit / 2);
  }

  // Called for sixteen operands of a unit.
  void fetch(size_t slot) {
    constexpr size_t kSlots = kVecs * kUnitSteps;
    if constexpr (kDecodes) {
      const size_t line = slot * kUnitLines / kSlots;
      if (line != (slot + 1) * kUnitLines / kSlots) {
        prefetch_l2(weight_ + kBytesAhead + line * (kUnitBytes / kUnitLines));
      }
    } else if (slot / 4 % kVecs == 0) {
      prefetch_l2(prefetch_);
      prefetch_l2(prefetch_ + t_.prefetch_half);
      prefetch_ += t_.prefetch_step;
    }
  }

  void whole(const uint8_t* factors, const float* params) {
    Int acc[kRows][kVecs];
    const uint8_t* factor = hidden(factors);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t_.act_stride) {
      const Int start = Dot::kWeightOffset
                            ? Dot::add(set1_int(comp(factor)), set1_int(comp(factor) + 1))
                            : Dot::set1_int(0);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = start;
        pin(acc[r][v]);
      }
    }
    add_half<0>(acc);
    add_half<1>(acc);
    Float scale[kVecs], min[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = Dot::load(params + v * Dot::kLanes);
      if constexpr (Shape::kMins) min[v] = Dot::load(params + kColumns + v * Dot::kLanes);
    }
    factor = hidden(factors);
    float* dst = hidden(t_.dst);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t_.act_stride, dst += t_.dst_stride) {
      const Factor* f = reinterpret_cast<const Factor*>(factor);
      const Float act_scale = Dot::set1(f->scale);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        float* to = dst + v * Dot::kLanes;
        Float value = Dot::mul(Dot::convert(acc[r][v]), act_scale);
        value = Dot::fma(value, scale[v], Dot::load(to));
        if constexpr (Shape::kMins) value = Dot::fma(Dot::set1(f->sum), min[v], value);
        Dot::store(to, value);
      }
    }
  }

  void halves(const uint8_t* factors, const float* params) {
    Int acc[kRows][kVecs];
    Float sum[kRows][kVecs];
    start_half<0>(acc, factors);
    add_half<0>(acc);
    scale_half<0>(acc, sum, params);
    start_half<1>(acc, factors);
    add_half<1>(acc);
    scale_half<1>(acc, sum, params);
    const uint8_t* factor = hidden(factors);
    float* dst = hidden(t_.dst);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t_.act_stride, dst += t_.dst_stride) {
      const Factor* f = reinterpret_cast<const Factor*>(factor);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        float* to = dst + v * Dot::kLanes;
        Float value = sum[r][v];
        if constexpr (Shape::kMins) {
          const float* min = params + 2 * kColumns + v * Dot::kLanes;
          value = Dot::fma(Dot::convert(set1_int(f->comp)), Dot::load(min), value);
          value = Dot::fma(Dot::convert(set1_int(f->comp + 1)), Dot::load(min + kColumns), value);
        }
        Dot::store(to, Dot::fma(value, Dot::set1(f->scale), Dot::load(to)));
      }
    }
  }

  template <int kHalf>
  void start_half(Int (&acc)[kRows][kVecs], const uint8_t* factors) {
    const uint8_t* factor = hidden(factors);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t_.act_stride) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = Dot::kWeightOffset ? set1_int(comp(factor) + kHalf) : Dot::set1_int(0);
        pin(acc[r][v]);
      }
    }
  }

  template <int kHalf>
  static void scale_half(Int (&acc)[kRows][kVecs], Float (&sum)[kRows][kVecs],
                         const float* params) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      const Float scale = Dot::load(params + kHalf * kColumns + v * Dot::kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Float value = Dot::convert(acc[r][v]);
        sum[r][v] = kHalf ? Dot::fma(value, scale, sum[r][v]) : Dot::mul(value, scale);
        pin(sum[r][v]);
      }
    }
  }

  const TileArgs t_;  // a copy that stores to dst cannot change
  const Weights weights_;
  const uint8_t* weight_;
  const uint8_t* prefetch_;
  const uint8_t* act_[kPointers];
};

using MultiplyTile = void (*)(const TileArgs&);

template <class Weights, class Shape, int kMaxRows>
struct Tiles {
  MultiplyTile of_rows[kMaxRows + 1];

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = Tile<Weights, Shape, kRows>::multiply;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr Tiles() : of_rows{} { fill(); }
};

template <class Weights, class Shape, int kMaxRows>
inline constexpr Tiles<Weights, Shape, kMaxRows> kTiles;

}  // namespace
}  // namespace ktk::llamafile
