// The product on vector registers, for any instruction set that says how four products are summed.
//
//   one tile: kRows rows of act x kVecs vectors of columns; 8 deep a turn
//
//                     weights v0    v1                 accumulators, one unit of k
//   act row 0   k0 k2 k4 k6  x  low   low
//               k1 k3 k5 k7  x  high  high     ->      acc[0][0]  acc[0][1]
//   act row 1   k0 k2 k4 k6  x  low   low
//     :         (broadcast)                              :
//
// At the end of a unit: dst += float(sum of products - zero * sum of act codes) * act scale *
// weight scale, in order of k. Integer sums have no order and dst is the only accumulator between
// units, hence GEMV and GEMM, whatever their tiles, return the same bits, and k can be cut in runs
// that keep the weights of a run in L1 for all rows.
//
// Every tile of rows splits the nibbles in registers again: six instructions beside up to 48
// products, and on other ports. Bytes split once would take twice the L1.
//
// A target `Dot` offers the operations of simd/zmm.h or ymm.h, and
//   dot(acc, weight, act)   adds four products per dword; act points at four codes
//   kSumsWords              dot() sums words, which finish(acc) adds to dwords
#pragma once

#include "codec/int4/act.h"
#include "codec/int4/layout.h"
#include "gemm/weight_stream.h"

namespace ktk::int4 {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kRunBytes = 16384;  // of codes, half an L1
// How far ahead of the arithmetic memory is read. Several tiles of rows share fetching the next run
// while they pass over this one. A lone tile leads the prefetcher of L2: from close by when it
// waits for memory, from further away when it computes as long.
constexpr size_t kSharedLines = 256;
constexpr size_t kNearLines = 8;
constexpr size_t kLoneLines = 128;
constexpr size_t kNearRows = 2;

struct TileArgs {
  const uint8_t* group;  // its parameters, of the group that unit_begin lies in
  size_t header_bytes;
  size_t column;       // of the block, where the tile begins
  const uint8_t* act;  // first row of the tile
  size_t act_stride;
  size_t factor_offset;  // in a row of act
  size_t unit_begin, unit_end, unit_depth, units_in_group;
  bool f16_scales;
  float* dst;
  size_t dst_stride;
  // What the tile fetches: in every turn the lines at prefetch and prefetch_half behind it, which
  // then move by prefetch_step. A lone tile fetches parameters when it comes to some.
  bool is_lone;
  const uint8_t* prefetch;
  size_t prefetch_half, prefetch_step;
};

constexpr size_t kCorrection = offsetof(Factor, correction);

// The same pointer, but gcc 12 does not know: it would compute the address of every row before the
// loops, and spill them.
template <class T>
inline T* hidden(T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// Keeps an accumulator apart from its neighbours, which gcc 12 would otherwise merge and split
// again.
template <class Int>
inline void pin(Int& x) {
  asm("" : "+v"(x));
}

template <class Dot, int kRows, int kVecs>
inline void multiply_turn(typename Dot::Int (&acc)[kRows][kVecs], const uint8_t* weight,
                          const uint8_t* const* act, size_t act_stride) {
  constexpr int kAtOnce = kRows < kVecs ? 1 : kVecs;  // vectors of weights in registers
#pragma GCC unroll 4
  for (int first = 0; first < kVecs; first += kAtOnce) {
    typename Dot::Int low[kAtOnce], high[kAtOnce];
#pragma GCC unroll 4
    for (int v = 0; v < kAtOnce; ++v) {
      const auto codes = Dot::load_bytes(weight + (first + v) * Dot::kLanes * 4);
      low[v] = Dot::low_nibbles(codes);
      high[v] = Dot::high_nibbles(codes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* a = act[r / 3] + r % 3 * act_stride;
      auto& sums = acc[r];
#pragma GCC unroll 4
      for (int v = 0; v < kAtOnce; ++v) sums[first + v] = Dot::dot(sums[first + v], low[v], a);
#pragma GCC unroll 4
      for (int v = 0; v < kAtOnce; ++v) sums[first + v] = Dot::dot(sums[first + v], high[v], a + 4);
    }
  }
}

// Scales and zero points of one vector of columns.
template <class Dot, bool kZeros>
struct Params {
  typename Dot::Float scale, zero;

  void load(const uint16_t* params, bool f16_scales) {
    scale = f16_scales ? Dot::load_f16(params) : Dot::load_bf16(params);
    if constexpr (kZeros) zero = Dot::load_bf16(params + kColumns);
  }
};

// dst += what one unit gives to a vector of columns. `sum` may have started at the correction.
template <class Dot, bool kZeros, bool kStartedCorrected>
inline void add_unit(float* dst, typename Dot::Int sum, const uint8_t* factor,
                     typename Dot::Float act_scale, const Params<Dot, kZeros>& params) {
  if constexpr (!kZeros && !kStartedCorrected) {
    sum = Dot::add(sum, Dot::broadcast(factor + kCorrection));
  }
  auto value = Dot::convert(sum);
  if constexpr (kZeros) {
    const float act_sum = *reinterpret_cast<const float*>(factor + kCorrection);
    value = Dot::fma(params.zero, Dot::set1(act_sum), value);
  }
  Dot::store(dst, Dot::fma(Dot::mul(value, act_scale), params.scale, Dot::load(dst)));
}

template <class Dot, bool kZeros, int kRows, int kVecs>
void multiply_tile(const TileArgs& args) {
  const TileArgs t = args;  // a copy that stores to dst cannot change
  // Every third row has a pointer, the two behind it are reached through the index register.
  constexpr int kPointers = (kRows + 2) / 3;
  constexpr bool kStartsCorrected = !kZeros && !Dot::kSumsWords;
  const uint8_t* act[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    act[i] = t.act + 3 * i * t.act_stride + t.unit_begin * t.unit_depth;
  }
  const uint8_t* prefetch = t.prefetch;
  const uint8_t* group = t.group;
  size_t in_group = t.unit_begin % t.units_in_group;
  const size_t unit_bytes = t.unit_depth / kTurn * kTurnBytes;
  const uint8_t* weight = group + t.header_bytes + in_group * unit_bytes + 4 * t.column;
  const uint8_t* unit_factors = t.act + t.factor_offset + t.unit_begin * sizeof(Factor);
  for (size_t unit = t.unit_begin; unit < t.unit_end; ++unit) {
    typename Dot::Int acc[kRows][kVecs];
    const uint8_t* factor = hidden(unit_factors);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t.act_stride) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = kStartsCorrected ? Dot::broadcast(factor + kCorrection) : Dot::set1_int(0);
        pin(acc[r][v]);
      }
    }
    const uint8_t* end = weight + unit_bytes;
    do {
      prefetch_l2(prefetch);
      prefetch_l2(prefetch + t.prefetch_half);
      prefetch += t.prefetch_step;
      multiply_turn<Dot>(acc, weight, act, t.act_stride);
#pragma GCC unroll 4
      for (int i = 0; i < kPointers; ++i) {
        act[i] = hidden(act[i] + kTurn);
      }
      weight += kTurnBytes;
    } while (weight != end);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) pin(acc[r][v]);
    }
    const uint16_t* params = reinterpret_cast<const uint16_t*>(group) + t.column;
    Params<Dot, kZeros> kept[kVecs];
    if constexpr (kRows > 1) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) kept[v].load(params + v * Dot::kLanes, t.f16_scales);
    }
    factor = hidden(unit_factors);
    float* dst = hidden(t.dst);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, factor += t.act_stride, dst += t.dst_stride) {
      const auto act_scale = Dot::set1(*reinterpret_cast<const float*>(factor));
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        if constexpr (kRows == 1) kept[v].load(params + v * Dot::kLanes, t.f16_scales);
        auto sum = acc[r][v];
        if constexpr (Dot::kSumsWords) sum = Dot::finish(sum);
        add_unit<Dot, kZeros, kStartsCorrected>(dst + v * Dot::kLanes, sum, factor, act_scale,
                                                kept[v]);
      }
    }
    unit_factors += sizeof(Factor);
    if (++in_group == t.units_in_group) {
      in_group = 0;
      group = weight - 4 * t.column;
      weight += t.header_bytes;
      if (t.is_lone) {
        for (size_t i = 0; i < t.header_bytes; i += kLine, prefetch += kLine) prefetch_l2(prefetch);
      }
    }
  }
}

template <class Dot>
inline void clear_dst(float* dst, size_t dst_stride, size_t m) {
  for (size_t r = 0; r < m; ++r, dst += dst_stride) {
    for (size_t i = 0; i < kColumns; i += Dot::kLanes) Dot::store(dst + i, Dot::set1(0));
  }
}

using MultiplyTile = void (*)(const TileArgs&);

template <class Dot, bool kZeros, int kMaxRows, int kVecs>
struct Tiles {
  MultiplyTile of_rows[kMaxRows + 1];

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = multiply_tile<Dot, kZeros, kRows, kVecs>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr Tiles() : of_rows{} { fill(); }
};

template <class Dot, bool kZeroPoints, int kMaxRows, int kVecs>
inline const MultiplyTile* tiles_for(const ktk_matrix* matrix) {
  static constexpr Tiles<Dot, false, kMaxRows, kVecs> kPlain;
  if constexpr (kZeroPoints) {
    static constexpr Tiles<Dot, true, kMaxRows, kVecs> kWithZeros;
    if (has_zeros(matrix)) return kWithZeros.of_rows;
  }
  return kPlain.of_rows;
}

// Columns [n_begin, n_end) of the packed matrix, which are contiguous.
inline WeightStream weight_stream(const ktk_matmul* mm) {
  const size_t columns = round_up(mm->n_end - mm->n_begin, kColumns);
  return {
      .begin = static_cast<const char*>(mm->weight) + block_offset(mm->matrix, mm->n_begin),
      .lines = block_offset(mm->matrix, columns) / kLine,
      .next = static_cast<const char*>(mm->next),
  };
}

// The product in tiles of up to kMaxRows x kVecs.
template <class Dot, class Act, int kMaxRows, int kVecs>
void multiply(const ktk_matmul* mm) {
  constexpr size_t kTileColumns = kVecs * Dot::kLanes;
  const ktk_matrix* matrix = mm->matrix;
  const MultiplyTile* of_rows = tiles_for<Dot, Act::kZeroPoints, kMaxRows, kVecs>(matrix);
  const size_t units = Act::num_units(matrix);
  const size_t row_tiles = (mm->m + kMaxRows - 1) / kMaxRows;
  const size_t tiles = row_tiles * (kColumns / kTileColumns);
  const WeightStream stream = weight_stream(mm);
  TileArgs t;
  t.header_bytes = header_bytes(matrix);
  t.act_stride = mm->act_stride;
  t.factor_offset = padded_k(matrix);
  t.unit_depth = Act::unit_depth(matrix);
  t.units_in_group = group_depth(matrix) / t.unit_depth;
  t.f16_scales = matrix->format.scale == KTK_F16;
  t.dst_stride = mm->dst_stride;
  t.is_lone = tiles == 1;
  const size_t unit_bytes = t.unit_depth / kTurn * kTurnBytes;
  const size_t run = tiles == 1 ? units : smaller(kRunBytes / unit_bytes, units);
  const size_t ahead = tiles > 1 ? kSharedLines : mm->m > kNearRows ? kLoneLines : kNearLines;
  const uint8_t* block = reinterpret_cast<const uint8_t*>(stream.begin);
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns, block += block_bytes(matrix)) {
    float* dst = mm->dst + (n - mm->n_begin);
    clear_dst<Dot>(dst, mm->dst_stride, mm->m);
    for (size_t unit = 0; unit < units; unit += run) {
      t.unit_begin = unit;
      t.unit_end = smaller(unit + run, units);
      t.group = block + unit / t.units_in_group * group_bytes(matrix);
      // The tiles of a run together fetch as much as they read.
      const size_t turns = (t.unit_end - unit) * t.unit_depth / kTurn;
      const size_t offset = t.group + unit % t.units_in_group * unit_bytes -
                            reinterpret_cast<const uint8_t*>(stream.begin);
      const size_t first = offset / kLine + ahead;
      const size_t turn_bytes = (group_bytes(matrix) * kTurn - 1) / group_depth(matrix) + 1;
      const size_t share = (turn_bytes - 1) / tiles + 1;  // of a turn
      t.prefetch_step = tiles == 1 ? kTurnBytes : (share + 1) / 2;
      t.prefetch_half = tiles == 1 ? kLine : t.prefetch_step * turns;
      // Rows are dealt out evenly: 13 are 7 + 6, not 12 + 1.
      size_t tile = 0;
      for (size_t i = 0, row = 0; i < row_tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / row_tiles;
        t.act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        for (t.column = 0; t.column < kColumns; t.column += kTileColumns, ++tile) {
          const size_t line = first + tile * turns * share / kLine;
          t.prefetch = reinterpret_cast<const uint8_t*>(stream.at(line));
          t.dst = dst + row * mm->dst_stride + t.column;
          of_rows[row_end - row](t);
        }
        row = row_end;
      }
    }
  }
}

}  // namespace
}  // namespace ktk::int4
