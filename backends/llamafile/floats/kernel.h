// The product of f32 rows with float weights, in registers of any width:
//
//            n 0..31
//   row 0:   acc[0][0] ... acc[0][vectors]       acc += broadcast(act[row][k]) * weights[k]
//   ...
//
// 12 rows x 32 n in 512 bits. 6 rows x 16 n in 256 bits, which passes over a run of weights in L1
// twice; or 2 rows x 32 n.
//
// Every output is one chain of FMAs over ascending k, wherever the cuts are: a row has the same
// bits in any batch, and in registers of any width.
#pragma once

#include "gemm/driver.h"
#include "llamafile/floats/codec.h"

namespace ktk::llamafile::floats {
namespace {

// sum += a * w. Not V::fma: gcc 12 also picks the forms that overwrite `a` or `w`, and copies
// registers to repair that.
template <class Float>
inline void multiply_add(Float& sum, Float a, Float w) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(w));
}

// V: registers, see simd/zmm.h and simd/ymm.h. kFetches: tiles fetch the weights that come next.
template <class V, ktk_element kElement, bool kFetches = true>
class Kernel {
  static constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;
  static constexpr size_t kLines = floats::kNr * kBytes / kLine;  // per k
  static constexpr size_t kVectors = floats::kNr / V::kLanes;

 public:
  static constexpr size_t kMr = V::kLanes == 16 ? 12 : 6;
  static constexpr size_t kNr = floats::kNr;
  static constexpr size_t kLineProducts = sizeof(float) / kBytes;

  explicit Kernel(const ktk_matmul* mm) : k_(mm->matrix->k) {}
  size_t slabs() const { return k_; }
  static size_t offset(size_t slab) { return slab * kNr * kBytes; }
  static constexpr size_t passes(size_t rows) { return V::kLanes == 16 || rows <= 2 ? 1 : 2; }
  static void tile(const Tile& t) {
    multiply(t, t.block + offset(t.begin), t.begin, t.end - t.begin);
  }
  // What a tile does, for `depth` of k from `begin` on.
  static void multiply(const Tile& t, const char* weights, size_t begin, size_t depth) {
    kTiles[t.rows](t, {weights, begin, depth});
  }

 private:
  static typename V::Float load(const char* weight) {
    if constexpr (kElement == KTK_F32) return V::load(reinterpret_cast<const float*>(weight));
    return V::load_f16(reinterpret_cast<const uint16_t*>(weight));
  }

  struct Weights {
    const char* at;
    size_t begin, depth;
  };

  // The registers of n of one pass.
  template <size_t kRows>
  static void multiply_pass(const Tile& t, const Weights& weights, size_t pass, Fetch& fetch) {
    constexpr size_t kAtOnce = kVectors / passes(kRows);
    const size_t n = pass * kAtOnce * V::kLanes;
    const char* weight = weights.at + n * kBytes;
    float* dst = t.dst + n;
    typename V::Float acc[kRows][kAtOnce];
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (size_t j = 0; j < kAtOnce; ++j) {
        acc[i][j] = t.is_first() ? V::set1(0) : V::load(dst + i * t.dst_stride + j * V::kLanes);
      }
    }
    RowPointers<kRows> act(t.act + weights.begin * sizeof(float), t.act_stride);
#pragma GCC unroll 1
    for (size_t k = 0; k < weights.depth; ++k) {
      if constexpr (kFetches) {
#pragma GCC unroll 2
        for (size_t i = 0; i < kLines; ++i) fetch.next();
      }
      typename V::Float w[kAtOnce];
#pragma GCC unroll 4
      for (size_t j = 0; j < kAtOnce; ++j) w[j] = load(weight + j * V::kLanes * kBytes);
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) {
        const typename V::Float a = V::set1(*reinterpret_cast<const float*>(act.row(i)));
#pragma GCC unroll 4
        for (size_t j = 0; j < kAtOnce; ++j) multiply_add(acc[i][j], a, w[j]);
      }
      weight += kNr * kBytes;
      act.advance(sizeof(float));
    }
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (size_t j = 0; j < kAtOnce; ++j) {
        V::store(dst + i * t.dst_stride + j * V::kLanes, acc[i][j]);
      }
    }
  }

  template <size_t kRows>
  static void multiply_tile(const Tile& t, const Weights& weights) {
    Fetch fetch = t.fetch;
    fetch.step = ceil_div(fetch.step, passes(kRows));
    for (size_t pass = 0; pass < passes(kRows); ++pass)
      multiply_pass<kRows>(t, weights, pass, fetch);
  }

  static constexpr auto kTiles = row_table<kMr>([]<size_t kRows> { return &multiply_tile<kRows>; });

  const size_t k_;
};

template <class V>
inline void multiply(const ktk_matmul* mm) {
  switch (mm->matrix->format.element) {
    case KTK_F32:
      return gemm<Kernel<V, KTK_F32>>(mm);
    case KTK_F16:
      return gemm<Kernel<V, KTK_F16>>(mm);
  }
}

}  // namespace
}  // namespace ktk::llamafile::floats
