// The product on vector registers: up to kMr rows of act times 32 columns. A line of weights holds
// four k of 16 columns, one vector or two; four codes of a row are broadcast to meet it.
//
//   wide                                      in order, where the CPU wants it for few rows
//            columns c..c+15   c+16..c+31       the same sums, but first all lines of a step for
//   row 0:   sums[0][0]        sums[1][0]       one tile of columns, then for the other: weights
//   row 1:   sums[0][1]        sums[1][1]       are used in the order of memory, which the CPU's
//     :                                         prefetchers follow; act is read twice
//
// Where registers do not hold the sums of all rows for both tiles of columns (AVX2), the wide form
// passes over a run of groups in L1 twice.
//
// A `Simd` offers, beside what simd/zmm.h has: Weight and Act with load_weight(), broadcast_act();
// dot(sums, weight, act), which adds four products to each sum; kLineProducts.
#pragma once

#include "amxint8/act.h"
#include "amxint8/kernel.h"

namespace ktk::amxint8 {
namespace {

// kInOrder: all tiles of columns, one after the other in a step. kTogether: line by line.
enum class TileOrder { kInOrder, kTogether };

template <class Simd, size_t kRows, size_t kTiles>
struct GroupSums {
  static constexpr size_t kVecs = kLine / 4 / Simd::kLanes;  // of a line
  typename Simd::Int v[kTiles][kRows][kVecs];

  // From the comp of each row on.
  GroupSums(const char* comp, size_t act_stride) {
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i, comp += act_stride) {
#pragma GCC unroll 2
      for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 2
        for (size_t j = 0; j < kVecs; ++j) v[tile][i][j] = Simd::broadcast(comp);
      }
    }
  }

  void store(GroupEnd end, const char* scale, size_t act_stride) const {
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i, scale += act_stride, end.next_row()) {
      const auto s = Simd::set1(*reinterpret_cast<const float*>(scale));
#pragma GCC unroll 2
      for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 2
        for (size_t j = 0; j < kVecs; ++j) {
          end.template store<Simd>(tile * kTileCols + j * Simd::kLanes, v[tile][i][j], s);
        }
      }
    }
  }
};

// Adds the products of a line of each of `kTiles` tiles of columns. A pointer to sums: gcc 12 would
// merge what is the same code for arrays of one tile and of two, and warn of the smaller one's end.
template <class Simd, size_t kTiles, size_t kRows, size_t kVecs>
inline void add_lines(typename Simd::Int (*sums)[kRows][kVecs], const char* weight,
                      const RowPointers<kRows>& act) {
  typename Simd::Weight w[kTiles][kVecs];
#pragma GCC unroll 2
  for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 2
    for (size_t j = 0; j < kVecs; ++j) {
      w[tile][j] = Simd::load_weight(weight + tile * kTileBytes + j * (kLine / kVecs));
    }
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const auto a = Simd::broadcast_act(act.row(i));
#pragma GCC unroll 2
    for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 2
      for (size_t j = 0; j < kVecs; ++j) {
        sums[tile][i][j] = Simd::dot(sums[tile][i][j], w[tile][j], a);
      }
    }
  }
}

// The same for all lines of a step.
template <class Simd, class Act, size_t kTiles, size_t kRows, size_t kVecs>
inline void add_step(typename Simd::Int (*sums)[kRows][kVecs], const char*& weight,
                     RowPointers<kRows>& act, Fetch& fetch) {
#pragma GCC unroll 1
  for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
    fetch.next_unseen_of<kTiles>();
    add_lines<Simd, kTiles, kRows, kVecs>(sums, weight, act);
    act.advance(4 * Act::kCodeBytes);
  }
}

// Up to kMr rows; products of up to kInOrderRows can use weights in order.
template <class Simd, class Act, size_t kMostRows, size_t kInOrderRows>
class VectorKernel : public KernelBase<Act> {
 public:
  static constexpr size_t kMr = kMostRows;
  static constexpr size_t kLineProducts = Simd::kLineProducts;

  explicit VectorKernel(const ktk_matmul* mm)
      : KernelBase<Act>(mm),
        is_in_order_(mm->m <= kInOrderRows && uses_in_order(mm, kLineProducts)) {}

  size_t passes(size_t) const { return is_in_order_ ? 1 : 2 / kWideTiles; }

  void tile(const Tile& t) const {
    static constexpr auto kInOrder = row_table<kInOrderRows>(
        []<size_t kRows> { return &VectorKernel::template multiply_in_order<kRows>; });
    static constexpr auto kWide =
        row_table<kMr>([]<size_t kRows> { return &VectorKernel::template multiply_wide<kRows>; });
    (this->*(is_in_order_ ? kInOrder[t.rows] : kWide[t.rows]))(t);
  }

 private:
  static constexpr size_t kWideTiles = Simd::kLanes == 16 ? 2 : 1;

  template <size_t kRows>
  void multiply_in_order(const Tile& t) const {
    Fetch fetch = t.fetch;
    multiply<kRows, 2, TileOrder::kInOrder>(t, 0, fetch);
  }
  template <size_t kRows>
  void multiply_wide(const Tile& t) const {
    Fetch fetch = t.fetch;
    for (size_t tile = 0; tile < 2; tile += kWideTiles) {
      multiply<kRows, kWideTiles, TileOrder::kTogether>(t, tile, fetch);
    }
  }

  template <size_t kRows, size_t kTiles, TileOrder kOrder>
  void multiply(const Tile& tile, size_t first_tile, Fetch& fetch) const {
    const Tile t = tile;  // a copy that stores to dst cannot change
    const char* scale = t.act + Act::scale_offset(this->matrix());
    const char* comp = t.act + Act::comp_offset(this->matrix());
    const float* weight_scale = this->scales_of(t.block) + first_tile * kTileCols;
    const size_t groups = this->slabs();
    RowPointers<kRows> act(t.act + t.begin * Act::kGroup * Act::kCodeBytes, t.act_stride);
    const char* weight = t.block + this->offset(t.begin) + first_tile * kTileBytes;
    for (size_t group = t.begin; group < t.end; ++group) {
      GroupSums<Simd, kRows, kTiles> sums(comp + group * sizeof(int32_t), t.act_stride);
      for (size_t step = this->num_steps_of(group); step > 0; --step) {
        if constexpr (kOrder == TileOrder::kInOrder) {
#pragma GCC unroll 2
          for (size_t i = 0; i < kTiles; ++i) {
            add_step<Simd, Act, 1>(sums.v + i, weight, act, fetch);
            if (i + 1 < kTiles) act.advance(-static_cast<ptrdiff_t>(kStepDepth * Act::kCodeBytes));
          }
        } else {
          add_step<Simd, Act, kTiles>(sums.v, weight, act, fetch);
          weight += kStepBytes - kTileBytes;
        }
      }
      sums.store({t.dst + first_tile * kTileCols, t.dst_stride, weight_scale, group == 0,
                  group + 1 == groups},
                 scale + group * sizeof(float), t.act_stride);
    }
  }

  bool is_in_order_;
};

}  // namespace
}  // namespace ktk::amxint8
