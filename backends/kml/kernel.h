// The tile, the same for every instruction set: rows x 8 columns, group by group of 256 k.
//
//   int32 sums of a group, in registers
//   dst = fma(float(sum), act scale, dst)         in order of k
//   dst *= weight scale                           with the last group
//
// Within a group everything is exact in int32, so a row has the same bits in any batch and for any
// tile, and all instruction sets agree bit for bit.
//
// A target `Sums<kRows>`, the sums of kRows rows x 8 columns, offers
//   add(line, rows, k)   adds the products of two lines and 16 k of each row
//   total(row, half)     the sums of columns 4 * half .. 4 * half + 3
#pragma once

#include <arm_neon.h>

#include "gemm/driver.h"
#include "kml/act.h"
#include "kml/layout.h"

namespace ktk::kml {
namespace {

template <class Sums>
inline void store_group(const ktk_matrix* matrix, const Tile& t, size_t group, size_t row,
                        const Sums& sums) {
  const float scale = act_scale(matrix, t.act + row * t.act_stride)[group];
  const float* weight_scale = reinterpret_cast<const float*>(t.block + scale_offset(matrix));
  float* dst = t.dst + row * t.dst_stride;
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half, dst += 4) {
    const float32x4_t before = group == 0 ? vdupq_n_f32(0) : vld1q_f32(dst);
    float32x4_t after = vfmaq_n_f32(before, vcvtq_f32_s32(sums.total(row, half)), scale);
    if (group + 1 == Act::num_groups(matrix)) {
      after = vmulq_f32(after, vld1q_f32(weight_scale + 4 * half));
    }
    vst1q_f32(dst, after);
  }
}

template <template <size_t> class Sums, size_t kRows>
void multiply_tile(const ktk_matrix* matrix, const Tile& t) {
  const int8_t* rows[kRows];
#pragma GCC unroll 8
  for (size_t i = 0; i < kRows; ++i) {
    rows[i] = reinterpret_cast<const int8_t*>(t.act + i * t.act_stride);
  }
  Fetch fetch = t.fetch;
  for (size_t group = t.begin; group < t.end; ++group) {
    const size_t end = smaller((group + 1) * Act::kGroup, padded_k(matrix));
    const int8_t* line = reinterpret_cast<const int8_t*>(t.block) + group * Act::kGroup * kNr;
    Sums<kRows> sums;
#pragma GCC unroll 1
    for (size_t k = group * Act::kGroup; k < end; k += kDepth, line += 2 * kLineBytes) {
      fetch.next();
      fetch.next();
      sums.add(line, rows, k);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < kRows; ++i) store_group(matrix, t, group, i, sums);
  }
}

// Tiles of up to kMost rows.
template <template <size_t> class Sums, size_t kMost>
struct Kernel {
  static constexpr size_t kMr = kMost, kNr = kml::kNr;
  static constexpr size_t kLineProducts = 1;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<Sums, kRows>; });

  const ktk_matrix* matrix;

  explicit Kernel(const ktk_matmul* mm) : matrix(mm->matrix) {}
  size_t slabs() const { return Act::num_groups(matrix); }
  size_t offset(size_t group) const {
    return group == slabs() ? block_bytes(matrix) : group * Act::kGroup * kNr;
  }
  static size_t passes(size_t) { return 1; }
  void tile(const Tile& t) const { kTiles[t.rows](matrix, t); }
};

}  // namespace
}  // namespace ktk::kml
