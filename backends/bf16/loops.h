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

#include <immintrin.h>

#include "layout.h"

namespace {

// What one tile of rows works on: `rows` rows of act times `steps` steps of one block of columns.
struct TileWork {
  const char* act; /* first row, first k of the run */
  size_t act_stride;
  const char* weight;
  size_t rows, steps;
  float* dst;
  size_t dst_stride;
  bool first;         // sums start at zero, not at dst
  const char* ahead;  // prefetch `ahead_lines` lines per step, from here on
  size_t ahead_lines;
};

// Prefetches the share of one step.
inline void prefetch_step(const TileWork& work, size_t step) {
  const char* line = work.ahead + step * work.ahead_lines * kLine;
  for (size_t i = 0; i < work.ahead_lines; ++i) _mm_prefetch(line + i * kLine, _MM_HINT_T0);
}

// Tile has: kRows and kSteps, the largest work it takes; kRowStep, which its rows are padded to;
// kActBytes, the size of one element of act; and run(const TileWork&).
template <class Tile>
inline void matmul(const ktk_matmul* mm) {
  const size_t steps = num_steps(mm->matrix);
  const size_t bytes = block_bytes(mm->matrix);
  const char* weight = static_cast<const char*>(mm->weight) + mm->n_begin / kBlockCols * bytes;
  const size_t blocks = (mm->n_end - mm->n_begin + kBlockCols - 1) / kBlockCols;
  const size_t tiles = (mm->m + Tile::kRows - 1) / Tile::kRows;
  // Tiles of nearly equal height: 13 rows are 7 + 6 and not 12 + 1.
  const size_t height =
      (mm->m + tiles * Tile::kRowStep - 1) / (tiles * Tile::kRowStep) * Tile::kRowStep;
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t step = 0; step < steps;) {
      const size_t count = steps - step < Tile::kSteps ? steps - step : Tile::kSteps;
      const char* here = weight + block * bytes + step * kStepBytes;
      const char* next = here + count * kStepBytes;
      const bool last = block + 1 == blocks && step + count == steps;
      if (last) next = static_cast<const char*>(mm->next);
      const size_t lines = last && !next ? 0 : count * kStepLines;
      const size_t share = (lines + tiles * count - 1) / (tiles * count);
      for (size_t tile = 0; tile < tiles; ++tile) {
        const size_t row = tile * height;
        const size_t done = tile * count * share;
        Tile::run({
            .act = static_cast<const char*>(mm->act) + row * mm->act_stride +
                   step * kStepDepth * Tile::kActBytes,
            .act_stride = mm->act_stride,
            .weight = here,
            .rows = mm->m - row < height ? mm->m - row : height,
            .steps = count,
            .dst = mm->dst + row * mm->dst_stride + block * kBlockCols,
            .dst_stride = mm->dst_stride,
            .first = step == 0,
            .ahead = next + done * kLine,
            .ahead_lines = done < lines ? share : 0,
        });
      }
      step += count;
    }
  }
}

}  // namespace
