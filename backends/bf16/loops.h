// The loops around a register tile, the same for every variant:
//
//   for each block of 32 columns                 one sequential stream of weights
//     for each run of up to Tile::kSteps steps     stays in L1 ...
//       for each tile of rows                        ... while all rows of act, from L2, pass it
//
// Between two runs the partial sums rest in dst. Every output is one chain of additions over
// ascending k, wherever the cuts are, so a row gets the same bits in any batch.
//
// Rows that share a run also share the work of fetching the next one: each tile of rows prefetches
// its part of it, a few cache lines per step, so that memory is read while the core computes.
#pragma once

#include <stddef.h>

#include "bf16/layout.h"
#include "gemm/prefetch.h"

namespace ktk::bf16 {
namespace {

// What one tile of rows works on: `rows` rows of act times `steps` steps of one block of columns.
template <class Share>
struct TileWork {
  const char* act; /* first row, first k of the run */
  size_t act_stride;
  const char* weight;
  size_t rows, steps;
  float* dst;
  size_t dst_stride;
  bool first;  // sums start at zero, not at dst
  Share stream;
};

// Prefetches what is due in one step, whose weights are at `weight`.
template <class Share>
inline void prefetch_step(const TileWork<Share>& work, size_t step, const char* weight) {
  work.stream.template prefetch<kStepLines>(step, weight);
}

// Columns [n_begin, n_end) of the packed matrix.
inline WeightStream weight_stream(const ktk_matmul* mm) {
  const size_t bytes = block_bytes(mm->matrix);
  const size_t blocks = (mm->n_end - mm->n_begin + kBlockCols - 1) / kBlockCols;
  return {
      .begin = static_cast<const char*>(mm->weight) + mm->n_begin / kBlockCols * bytes,
      .lines = blocks * bytes / kLine,
      .next = static_cast<const char*>(mm->next),
  };
}

// Tile has: kRows, the most rows it takes; kSteps, the longest run for several tiles of rows, and
// kLoneSteps for only one, which does not come back to the weights; kRowStep, which its rows are
// padded to; kActBytes, the size of one element of act; and run(const TileWork&).
template <class Tile, class Share>
inline void matmul_tiles(const ktk_matmul* mm, size_t tiles) {
  const size_t steps = num_steps(mm->matrix);
  const size_t blocks = (mm->n_end - mm->n_begin + kBlockCols - 1) / kBlockCols;
  const WeightStream stream = weight_stream(mm);
  // Tiles of nearly equal height: 13 rows are 7 + 6 and not 12 + 1.
  const size_t row_steps = (mm->m + Tile::kRowStep - 1) / Tile::kRowStep;
  const size_t height = (row_steps + tiles - 1) / tiles * Tile::kRowStep;
  const auto multiply = [&](size_t block, size_t step, size_t count) {
    const size_t line = (block * steps + step) * kStepLines;
    for (size_t tile = 0; tile < tiles; ++tile) {
      const size_t row = tile * height;
      Tile::run(TileWork<Share>{
          .act = static_cast<const char*>(mm->act) + row * mm->act_stride +
                 step * kStepDepth * Tile::kActBytes,
          .act_stride = mm->act_stride,
          .weight = stream.begin + line * kLine,
          .rows = mm->m - row < height ? mm->m - row : height,
          .steps = count,
          .dst = mm->dst + row * mm->dst_stride + block * kBlockCols,
          .dst_stride = mm->dst_stride,
          .first = step == 0,
          .stream = {stream, tile, tiles, line, count, kStepLines},
      });
    }
  };
  const auto smaller = [](size_t a, size_t b) { return a < b ? a : b; };
  const size_t run = tiles == 1 ? Tile::kLoneSteps : Tile::kSteps;
  for (size_t block = 0; block < blocks; ++block) {
    if (!Share::kFollowsNext && block + 1 == blocks) stream.begin_next();
    for (size_t step = 0; step < steps; step += smaller(steps - step, run)) {
      multiply(block, step, smaller(steps - step, run));
    }
  }
}

// Lone and Shared are streams of weights (gemm/prefetch.h): how weights are prefetched where there
// is one tile of rows, and where several tiles read the same weights.
template <class Tile, class Lone, class Shared>
inline void matmul(const ktk_matmul* mm) {
  const size_t tiles = (mm->m + Tile::kRows - 1) / Tile::kRows;
  if (tiles == 1) {
    matmul_tiles<Tile, Lone>(mm, tiles);
  } else {
    matmul_tiles<Tile, Shared>(mm, tiles);
  }
}

}  // namespace
}  // namespace ktk::bf16
