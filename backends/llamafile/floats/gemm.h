// The product of f32 rows with float weights, in registers of any width:
//
//            columns 0..31
//   row 0:   acc[0][0] ... acc[0][vectors]       acc += broadcast(act[row][k]) * weights[k]
//   ...
//
// 12 rows x 32 columns in 512 bits. 6 rows x 16 columns in 256 bits, which passes over a run of
// weights in L1 twice; or 2 rows x 32 columns.
//
// Every output is one chain of FMAs over ascending k, wherever the cuts are: a row has the same
// bits in any batch, and in registers of any width.
#pragma once

#include "gemm/rows.h"
#include "gemm/weight_stream.h"
#include "llamafile/floats/codec.h"

namespace ktk::llamafile::floats {
namespace {

constexpr size_t kRunLines = 256;  // 16 KiB of weights stay in L1 while several tiles pass

// What a line of weights is for a product in V.
template <class V, ktk_element kElement>
struct Weights {
  static constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;
  static constexpr size_t kLines = kNr * kBytes / kLine;  // per k

  static typename V::Float load(const char* p) {
    if constexpr (kElement == KTK_F32) return V::load(reinterpret_cast<const float*>(p));
    return V::load_f16(reinterpret_cast<const uint16_t*>(p));
  }
};

// sum += a * w. Not V::fma: gcc 12 also picks the forms that overwrite `a` or `w`, and copies
// registers to repair that.
template <class Float>
inline void multiply_add(Float& sum, Float a, Float w) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}

// How many registers of columns meet a row at once, and how often that passes over the weights.
template <class V>
constexpr size_t vectors_at_once(size_t rows) {
  return kNr / V::kLanes / (V::kLanes == 16 || rows <= 2 ? 1 : 2);
}
template <class V>
constexpr size_t passes(size_t rows) {
  return kNr / V::kLanes / vectors_at_once<V>(rows);
}

// `rows` rows times `depth` of one block.
struct TileWork {
  const char* act;
  size_t act_stride;
  const char* weight;
  size_t rows, depth;
  float* dst;
  size_t dst_stride;
  bool first;  // sums start at zero, not at dst
  // Every pass fetches a part of what comes next: one address per line of weights.
  const WeightStream* stream;
  size_t ahead;       // line of the stream that the first pass begins with
  size_t share;       // lines of a pass
  size_t ahead_step;  // bytes between two addresses
};

// The registers of columns of one pass.
template <class W, class V, size_t kM>
inline void multiply_columns(const TileWork& work, size_t pass) {
  constexpr size_t kVectors = vectors_at_once<V>(kM);
  const char* weight = work.weight + pass * kVectors * V::kLanes * W::kBytes;
  float* dst = work.dst + pass * kVectors * V::kLanes;
  typename V::Float acc[kM][kVectors];
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      acc[i][j] = work.first ? V::set1(0) : V::load(dst + i * work.dst_stride + j * V::kLanes);
    }
  }
  RowPointers<kM> act(work.act, work.act_stride);
  const char* ahead = work.stream->at(work.ahead + pass * work.share);
#pragma GCC unroll 1
  for (size_t k = 0; k < work.depth; ++k) {
#pragma GCC unroll 2
    for (size_t i = 0; i < W::kLines; ++i, ahead += work.ahead_step) prefetch_l2(ahead);
    typename V::Float w[kVectors];
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) w[j] = W::load(weight + j * V::kLanes * W::kBytes);
#pragma GCC unroll 12
    for (size_t i = 0; i < kM; ++i) {
      const typename V::Float a = V::set1(*reinterpret_cast<const float*>(act.row(i)));
#pragma GCC unroll 4
      for (size_t j = 0; j < kVectors; ++j) multiply_add(acc[i][j], a, w[j]);
    }
    weight += kNr * W::kBytes;
    act.advance(sizeof(float));
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      V::store(dst + i * work.dst_stride + j * V::kLanes, acc[i][j]);
    }
  }
}

template <class W, class V, size_t kM>
void multiply_tile(const TileWork& work) {
  for (size_t pass = 0; pass < passes<V>(kM); ++pass) multiply_columns<W, V, kM>(work, pass);
}

template <class V>
constexpr size_t kMostRows = V::kLanes == 16 ? 12 : 6;

template <class W, class V>
inline void multiply_rows(const TileWork& work) {
  static constexpr void (*kTiles[])(const TileWork&) = {
      multiply_tile<W, V, 1>, multiply_tile<W, V, 2>, multiply_tile<W, V, 3>,
      multiply_tile<W, V, 4>, multiply_tile<W, V, 5>, multiply_tile<W, V, 6>,
  };
  if constexpr (kMostRows<V> > 6) {
    static constexpr void (*kTallTiles[])(const TileWork&) = {
        multiply_tile<W, V, 7>,  multiply_tile<W, V, 8>,  multiply_tile<W, V, 9>,
        multiply_tile<W, V, 10>, multiply_tile<W, V, 11>, multiply_tile<W, V, 12>,
    };
    if (work.rows > 6) return kTallTiles[work.rows - 7](work);
  }
  kTiles[work.rows - 1](work);
}

template <class V, ktk_element kElement>
inline void multiply_as(const ktk_matmul* mm) {
  using W = Weights<V, kElement>;
  const size_t k = mm->matrix->k, bytes = block_bytes(mm->matrix);
  const size_t blocks = (mm->n_end - mm->n_begin + kNr - 1) / kNr;
  const WeightStream stream = {
      .begin = static_cast<const char*>(mm->weight) + weight_offset(mm->matrix, mm->n_begin),
      .lines = blocks * bytes / kLine,
      .next = static_cast<const char*>(mm->next),
  };
  // Tiles of nearly equal height: 13 rows are 7 + 6 and not 12 + 1.
  const size_t tiles = (mm->m + kMostRows<V> - 1) / kMostRows<V>;
  const size_t height = (mm->m + tiles - 1) / tiles;
  // A lone pass fetches every line soon before it is used, several share fetching the next run.
  const size_t turns = tiles * passes<V>(height);
  const size_t distance = turns == 1 ? bytes_ahead(mm->m) / kLine : kRunLines;
  const size_t share = turns == 1 ? 0 : kRunLines / turns + 1;
  constexpr size_t kRun = kRunLines / W::kLines;
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t begin = 0; begin < k; begin += kRun) {
      const size_t line = block * bytes / kLine + begin * W::kLines;
      size_t ahead = line + distance;
      for (size_t row = 0; row < mm->m; row += height, ahead += share * passes<V>(height)) {
        multiply_rows<W, V>({
            .act = static_cast<const char*>(mm->act) + row * mm->act_stride + begin * sizeof(float),
            .act_stride = mm->act_stride,
            .weight = stream.begin + line * kLine,
            .rows = smaller(mm->m - row, height),
            .depth = smaller(kRun, k - begin),
            .dst = mm->dst + row * mm->dst_stride + block * kNr,
            .dst_stride = mm->dst_stride,
            .first = begin == 0,
            .stream = &stream,
            .ahead = ahead,
            .share = share,
            .ahead_step = turns == 1 ? kLine : kLine / turns + 1,
        });
      }
    }
  }
}

// V: registers, see simd/zmm.h and simd/ymm.h.
template <class V>
inline void multiply(const ktk_matmul* mm) {
  switch (mm->matrix->format.element) {
    case KTK_F32:
      return multiply_as<V, KTK_F32>(mm);
    case KTK_F16:
      return multiply_as<V, KTK_F16>(mm);
  }
}

}  // namespace
}  // namespace ktk::llamafile::floats
