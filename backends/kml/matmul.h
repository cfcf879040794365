// The loops around a register tile, the same for every instruction set:
//
//   for each block of 8 columns                   one sequential stream of weights
//     for each run of 8 groups of 256 k             16 KiB, stays in L1 ...
//       for each tile of rows                         ... while all rows of act pass it
//         for each group                                int32 sums in registers
//           dst = fma(float(sum), act scale, dst)         in order of k
//     dst *= weight scale                           with the last group
//
// Within a group everything is exact in int32, so a row has the same bits in any batch and for any
// tile, and all instruction sets agree bit for bit.
//
// A target `Sums<kM>`, the sums of kM rows x 8 columns, offers
//   add(line, rows, k)   adds the products of two lines and 16 k of each row
//   total(row, half)     the sums of columns 4 * half .. 4 * half + 3
#pragma once

#include <arm_neon.h>

#include "kml/act.h"
#include "kml/layout.h"

namespace ktk::kml {
namespace {

constexpr size_t kRunGroups = 8;

// No load moves across: gcc 12 takes loads to the front of a loop, and spills sums to make room.
inline void keep_order() { asm volatile("" : : : "memory"); }

// What one tile of rows works on: `rows` rows of act times groups [begin, end) of a block.
struct TileWork {
  const ktk_matrix* matrix;
  const int8_t* block;
  const uint8_t* act;
  size_t act_stride;
  size_t rows, begin, end;
  float* dst;
  size_t dst_stride;
};

template <class Sums>
inline void store_group(const TileWork& work, size_t group, size_t row, const Sums& sums) {
  const float scale = act_scale(work.matrix, work.act + row * work.act_stride)[group];
  float* dst = work.dst + row * work.dst_stride;
  const int8_t* last = work.block + scale_offset(work.matrix);
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half, dst += 4) {
    const float32x4_t before = group == 0 ? vdupq_n_f32(0) : vld1q_f32(dst);
    float32x4_t after = vfmaq_n_f32(before, vcvtq_f32_s32(sums.total(row, half)), scale);
    if (group + 1 == num_groups(work.matrix)) {
      after = vmulq_f32(after, vld1q_f32(reinterpret_cast<const float*>(last) + 4 * half));
    }
    vst1q_f32(dst, after);
  }
}

template <template <size_t> class Sums, size_t kM>
void tile(const TileWork& work) {
  const int8_t* rows[kM];
#pragma GCC unroll 8
  for (size_t i = 0; i < kM; ++i) {
    rows[i] = reinterpret_cast<const int8_t*>(work.act + i * work.act_stride);
  }
  for (size_t group = work.begin; group < work.end; ++group) {
    const size_t end = smaller((group + 1) * kGroup, padded_k(work.matrix));
    const int8_t* line = work.block + group * kGroup * kColumns;
    Sums<kM> sums;
#pragma GCC unroll 1
    for (size_t k = group * kGroup; k < end; k += kDepth, line += 2 * kLineBytes) {
      sums.add(line, rows, k);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < kM; ++i) store_group(work, group, i, sums);
  }
}

template <template <size_t> class Sums, size_t kMax, size_t... kM>
inline void run_tile(const TileWork& work) {
  if constexpr (sizeof...(kM) < kMax) {
    run_tile<Sums, kMax, kM..., sizeof...(kM) + 1>(work);
  } else {
    static constexpr void (*kTiles[])(const TileWork&) = {tile<Sums, kM>...};
    kTiles[work.rows - 1](work);
  }
}

// Tiles of up to kMax rows, all of nearly the same height: 9 rows are 5 + 4 and not 8 + 1.
template <template <size_t> class Sums, size_t kMax>
void matmul(const ktk_matmul* mm) {
  const size_t tiles = (mm->m + kMax - 1) / kMax, height = (mm->m + tiles - 1) / tiles;
  const size_t groups = num_groups(mm->matrix);
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    for (size_t begin = 0; begin < groups; begin += kRunGroups) {
      for (size_t row = 0; row < mm->m; row += height) {
        run_tile<Sums, kMax>({
            .matrix = mm->matrix,
            .block = static_cast<const int8_t*>(mm->weight) + block_offset(mm->matrix, n),
            .act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride,
            .act_stride = mm->act_stride,
            .rows = smaller(height, mm->m - row),
            .begin = begin,
            .end = smaller(begin + kRunGroups, groups),
            .dst = mm->dst + row * mm->dst_stride + (n - mm->n_begin),
            .dst_stride = mm->dst_stride,
        });
      }
    }
  }
}

}  // namespace
}  // namespace ktk::kml
