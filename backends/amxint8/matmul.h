// The product on vector registers, for any instruction set that says how four products are summed.
//
//   one tile: kRows rows of act x kVecs vectors of columns; 4 deep a turn
//
//                  weight v0   v1          int32 accumulators, one group of k
//   act row 0  k0..k3  x  |    |     ->    acc[0][0]  acc[0][1]
//   act row 1  k0..k3  x  |    |     ->    acc[1][0]  acc[1][1]
//     :      (broadcast)                     :
//
// At the end of a group: dst += float(acc) * act scale, in order of k; finally
// dst *= weight scale. dst is the only accumulator between groups, so k can be cut in blocks that
// keep the weights of a block in L1 for all rows. Integer sums have no order, hence GEMV and GEMM,
// whatever their tiles, return the same bits.
//
// A target `Dot` offers: Int, Float, kLanes; Weight and Act with load_weight(), broadcast_act();
// dot(acc, weight, act) and kAddLatency, the cycles until acc can be used again; add, set1_int,
// set1, load, store, convert, mul, fma.
#pragma once

#include "amxint8/act.h"
#include "amxint8/layout.h"
#include "amxint8/stream.h"
#include "gemm/weight_stream.h"

namespace ktk::amxint8 {
namespace {

struct TileArgs {
  const uint8_t* weight;  // first step of the block, columns of the tile
  const uint8_t* act;     // first row of the tile
  size_t act_stride;
  size_t scale_offset, comp_offset;  // in a row of act
  size_t step_begin, step_end;
  float* dst;
  size_t dst_stride;
  const uint8_t* prefetch;  // what this tile fetches ahead: 32 bytes * prefetch_step a turn
  size_t prefetch_half, prefetch_step;
};

template <class Dot, int kRows, int kVecs, int kChains>
inline void multiply_turn(typename Dot::Int (&acc)[kChains][kRows][kVecs], int chain,
                          const uint8_t* weight, const uint8_t* const* act, size_t act_offset,
                          size_t act_stride) {
  constexpr int kVecBytes = Dot::kLanes * 4;
  if constexpr (kRows < kVecs) {
    typename Dot::Act a[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      a[r] = Dot::broadcast_act(act[r / 3] + act_offset + r % 3 * act_stride);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const int byte = v * kVecBytes;
      const auto w = Dot::load_weight(weight + byte / 64 * kTileBytes + byte % 64);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) acc[chain][r][v] = Dot::dot(acc[chain][r][v], w, a[r]);
    }
  } else {
    typename Dot::Weight w[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const int byte = v * kVecBytes;
      w[v] = Dot::load_weight(weight + byte / 64 * kTileBytes + byte % 64);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto a = Dot::broadcast_act(act[r / 3] + act_offset + r % 3 * act_stride);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[chain][r][v] = Dot::dot(acc[chain][r][v], w[v], a);
    }
  }
}

// One tile over steps [step_begin, step_end), which start at a group. kChains > 1 sums turns in
// turn into several accumulators, for tiles too small to hide the latency of dot().
template <class Dot, class Act, int kRows, int kVecs, int kChains, auto kFetch>
void multiply_tile(const TileArgs& args) {
  using Int = typename Dot::Int;
  const TileArgs t = args;  // a copy that stores to dst cannot change
  // Every third row has a pointer, the two behind it are reached through the index register.
  constexpr int kPointers = (kRows + 2) / 3;
  const uint8_t* act[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) {
    act[i] = t.act + 3 * i * t.act_stride + t.step_begin * kDepth * Act::kCodeBytes;
  }
  const uint8_t* weight = t.weight - t.step_begin * kStepBytes;
  const uint8_t* prefetch = t.prefetch;
  for (size_t begin = t.step_begin; begin < t.step_end; begin += Act::kGroupSteps) {
    const size_t end = smaller(begin + Act::kGroupSteps, t.step_end);
    const size_t group = begin / Act::kGroupSteps;
    const uint8_t* comp = t.act + t.comp_offset + 4 * group;
    Int acc[kChains][kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        acc[0][r][v] = Dot::broadcast(comp + r * t.act_stride);
#pragma GCC unroll 4
        for (int i = 1; i < kChains; ++i) acc[i][r][v] = Dot::set1_int(0);
      }
    }
    // One flat loop: gcc 12 copies the accumulators between nested ones. `at` counts the bytes of
    // one tile per step; those of the other one are skipped.
#pragma GCC unroll 1
    for (size_t at = begin * kTileBytes; at < end * kTileBytes; at += kChains * 64) {
      const uint8_t* w = weight + at + at / kTileBytes * kTileBytes;
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
        kFetch(prefetch);
        kFetch(prefetch + t.prefetch_half);
        prefetch += t.prefetch_step;
        multiply_turn<Dot>(acc, i, w + 64 * i, act, 4 * i * Act::kCodeBytes, t.act_stride);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kPointers; ++i) {
        act[i] += kChains * 4 * Act::kCodeBytes;
        asm("" : "+r"(act[i]));  // or gcc 12 makes an offset per row of it, and spills those
      }
    }
    const uint8_t* scale = t.act + t.scale_offset + 4 * group;
    float* dst = t.dst;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, scale += t.act_stride, dst += t.dst_stride) {
      const auto s = Dot::set1(*reinterpret_cast<const float*>(scale));
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        float* to = dst + v * Dot::kLanes;
        Int sum = acc[0][r][v];
#pragma GCC unroll 4
        for (int i = 1; i < kChains; ++i) sum = Dot::add(sum, acc[i][r][v]);
        Dot::store(to, Dot::fma(Dot::convert(sum), s, Dot::load(to)));
      }
    }
  }
}

// Both tiles of a block of 32 columns for up to 12 rows, one group after the other. In a step, all
// of the first tile comes before the second: weights are used in the order of memory, which the
// prefetchers of the CPU follow. `ahead` is what to fetch in the first step, in order, too.
template <class Dot, class Act, int kRows>
void thin_block(const uint8_t* weight, const TileArgs& t, const Stream& stream, size_t ahead) {
  using Int = typename Dot::Int;
  constexpr int kVecs = 16 / Dot::kLanes;  // of a tile
  constexpr int kPointers = (kRows + 2) / 3;
  const uint8_t* act[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) act[i] = t.act + 3 * i * t.act_stride;
  for (size_t begin = 0; begin < t.step_end; begin += Act::kGroupSteps) {
    const size_t end = smaller(begin + Act::kGroupSteps, t.step_end);
    const size_t group = begin / Act::kGroupSteps;
    const uint8_t* comp = t.act + t.comp_offset + 4 * group;
    Int acc[2][1][kRows][kVecs];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kVecs; ++v) {
        acc[v / kVecs][0][r][v % kVecs] = Dot::broadcast(comp + r * t.act_stride);
      }
    }
    for (size_t step = begin; step < end; ++step, ahead += kStepBytes) {
      const uint8_t* prefetch = stream.at(ahead);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 1
        for (const uint8_t* last = weight + kTileBytes; weight != last; weight += 64) {
          prefetch_l2(prefetch);
          prefetch += 64;
          multiply_turn<Dot>(acc[half], 0, weight, act, 0, t.act_stride);
#pragma GCC unroll 4
          for (int i = 0; i < kPointers; ++i) {
            act[i] += 4 * Act::kCodeBytes;
            asm("" : "+r"(act[i]));  // as below
          }
        }
        if (half == 0) {
#pragma GCC unroll 4
          for (int i = 0; i < kPointers; ++i) act[i] -= kDepth * Act::kCodeBytes;
        }
      }
    }
    const uint8_t* scale = t.act + t.scale_offset + 4 * group;
    float* dst = t.dst;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r, scale += t.act_stride, dst += t.dst_stride) {
      const auto s = Dot::set1(*reinterpret_cast<const float*>(scale));
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kVecs; ++v) {
        float* to = dst + v * Dot::kLanes;
        Dot::store(to, Dot::fma(Dot::convert(acc[v / kVecs][0][r][v % kVecs]), s, Dot::load(to)));
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

template <class Dot>
inline void scale_dst(float* dst, size_t dst_stride, size_t m, const float* scale) {
  for (size_t r = 0; r < m; ++r, dst += dst_stride) {
    for (size_t i = 0; i < kColumns; i += Dot::kLanes) {
      Dot::store(dst + i, Dot::mul(Dot::load(dst + i), Dot::load(scale + i)));
    }
  }
}

using MultiplyTile = void (*)(const TileArgs&);

// How many accumulators an output needs so that two pipes never wait for dot() to add to one.
template <class Dot>
constexpr int chains(int outputs) {
  if (Dot::kAddLatency == 1) return 1;
  return outputs >= 6 ? 1 : outputs >= 4 ? 2 : 4;
}

template <class Dot, class Act, int kMaxRows, int kVecs, auto kFetch>
struct Tiles {
  MultiplyTile of_rows[kMaxRows + 1];

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = multiply_tile<Dot, Act, kRows, kVecs, chains<Dot>(kRows * kVecs), kFetch>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr Tiles() : of_rows{} { fill(); }
};

template <class Dot, class Act, int kMaxRows>
struct ThinBlocks {
  void (*of_rows[kMaxRows + 1])(const uint8_t*, const TileArgs&, const Stream&, size_t);

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = thin_block<Dot, Act, kRows>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr ThinBlocks() : of_rows{} { fill(); }
};

// The product for up to kMaxRows rows, which wait for memory.
template <class Dot, class Act, int kMaxRows>
void multiply_thin(const ktk_matmul* mm) {
  static constexpr ThinBlocks<Dot, Act, kMaxRows> kBlocks;
  const ktk_matrix* matrix = mm->matrix;
  const Stream stream = weight_stream(mm);
  TileArgs t{};
  t.act = static_cast<const uint8_t*>(mm->act);
  t.act_stride = mm->act_stride;
  t.scale_offset = Act::scale_offset(matrix);
  t.comp_offset = Act::comp_offset(matrix);
  t.step_end = num_steps(matrix);
  t.dst = mm->dst;
  t.dst_stride = mm->dst_stride;
  const uint8_t* weight = stream.begin;
  const float* scale = weight_scale(matrix, mm->weight);
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns, t.dst += kColumns) {
    clear_dst<Dot>(t.dst, t.dst_stride, mm->m);
    kBlocks.of_rows[mm->m](weight, t, stream, weight - stream.begin + bytes_ahead(mm->m));
    weight += t.step_end * kStepBytes;
    scale_dst<Dot>(t.dst, t.dst_stride, mm->m, scale + n);
  }
}

// The product in tiles of up to kMaxRows x kVecs; weights stay in L1 for kBlockSteps steps of
// depth, while the tiles of that block prefetch the next one, so that memory never waits for
// arithmetic: into L1, which takes the time of several tiles, or with kFetch = prefetch_l2 into L2.
template <class Dot, class Act, int kMaxRows, int kVecs, size_t kBlockSteps,
          auto kFetch = prefetch_l1>
void multiply(const ktk_matmul* mm) {
  static_assert(kBlockSteps % Act::kGroupSteps == 0);
  static constexpr Tiles<Dot, Act, kMaxRows, kVecs, kFetch> kTiles;
  constexpr size_t kTileColumns = kVecs * Dot::kLanes;
  const ktk_matrix* matrix = mm->matrix;
  const size_t steps = num_steps(matrix);
  const size_t row_tiles = (mm->m + kMaxRows - 1) / kMaxRows;
  const size_t tiles = row_tiles * (kColumns / kTileColumns);
  const uint8_t* packed = static_cast<const uint8_t*>(mm->weight);
  const Stream stream = weight_stream(mm);
  TileArgs t;
  t.act_stride = mm->act_stride;
  t.scale_offset = Act::scale_offset(matrix);
  t.comp_offset = Act::comp_offset(matrix);
  t.dst_stride = mm->dst_stride;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    const uint8_t* weight = packed + block_offset(matrix, n);
    float* dst = mm->dst + (n - mm->n_begin);
    clear_dst<Dot>(dst, mm->dst_stride, mm->m);
    for (size_t step = 0; step < steps; step += kBlockSteps, weight += kBlockSteps * kStepBytes) {
      t.step_begin = step;
      t.step_end = smaller(step + kBlockSteps, steps);
      // The tiles of a block together fetch as much as they read.
      size_t ahead = weight - stream.begin + kPrefetchDistance;
      t.prefetch_step = 64 / tiles;
      t.prefetch_half = t.prefetch_step * (kDepth / 4) * (t.step_end - step);
      // Rows are dealt out evenly: 13 are 7 + 6, not 12 + 1.
      for (size_t i = 0, row = 0; i < row_tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / row_tiles;
        t.act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        for (size_t column = 0; column < kColumns; column += kTileColumns) {
          t.prefetch = stream.at(ahead);
          t.weight = weight + column / 16 * kTileBytes;
          t.dst = dst + row * mm->dst_stride + column;
          kTiles.of_rows[row_end - row](t);
          ahead += 2 * t.prefetch_half;
        }
        row = row_end;
      }
    }
    scale_dst<Dot>(dst, mm->dst_stride, mm->m, weight_scale(matrix, packed) + n);
  }
}

}  // namespace
}  // namespace ktk::amxint8
