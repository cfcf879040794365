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

// Not _mm_prefetch: gcc 12 takes a function that only prefetches for one without effect and drops
// calls of it.
inline void prefetch_l2(const char* line) { asm volatile("prefetcht1 %0" : : "m"(*line)); }

// The weights of a call as a stream of cache lines, and what follows it.
//
// Lines are fetched kAhead lines before they are used, in the order of eight streams: one line of
// each 4 KiB page of a 32 KiB chunk, then the next line of each. A core has too few buffers to
// cover the latency of memory by prefetch instructions alone; the prefetcher of L2 has more, but
// follows one stream per page, up to 20 lines ahead, so it takes many pages to keep memory busy.
struct WeightStream {
  static constexpr size_t kPage = 4096;
  static constexpr size_t kAhead = 512;

  const char* begin;
  size_t lines;
  const char* next;  // continues the stream; may be null

  // Fetches the `count` lines whose turn comes when `line` is used. Both are multiples of 4, four
  // lines are one instruction each: what waits for memory should not fill the reorder buffer.
  void prefetch(size_t line, size_t count) const {
    const size_t chunk = line / kAhead * kAhead + kAhead;
    const char* base = chunk < lines ? begin + chunk * kLine : next;
    if (!base) return;
    if (chunk >= lines) base += (chunk - lines) * kLine;
    const size_t in_chunk = line % kAhead;
    base += in_chunk / 8 * kLine;
    for (size_t i = in_chunk % 8; i < in_chunk % 8 + count; i += 4) {
      const char* four = base + i / 8 * kLine + i % 8 * kPage;
      prefetch_l2(four);
      prefetch_l2(four + kPage);
      prefetch_l2(four + 2 * kPage);
      prefetch_l2(four + 3 * kPage);
    }
  }
};

// What one tile of rows works on: `rows` rows of act times `steps` steps of one block of columns.
struct TileWork {
  const char* act; /* first row, first k of the run */
  size_t act_stride;
  const char* weight;
  size_t rows, steps;
  float* dst;
  size_t dst_stride;
  bool first;  // sums start at zero, not at dst
  const WeightStream* stream;
  size_t line, lines_per_step;  // this tile's share of the stream
};

// Prefetches the share of one step.
inline void prefetch_step(const TileWork& work, size_t step) {
  const size_t begin = (work.line + step * work.lines_per_step) & ~size_t{3};
  const size_t end = (work.line + (step + 1) * work.lines_per_step) & ~size_t{3};
  if (begin != end) work.stream->prefetch(begin, end - begin);
}

// Tile has: kRows, the most rows it takes; kSteps, the longest run for several tiles of rows, and
// kLoneSteps for only one, which does not come back to the weights; kRowStep, which its rows are
// padded to; kActBytes, the size of one element of act; and run(const TileWork&).
template <class Tile>
inline void matmul(const ktk_matmul* mm) {
  const size_t steps = num_steps(mm->matrix);
  const size_t bytes = block_bytes(mm->matrix);
  const size_t blocks = (mm->n_end - mm->n_begin + kBlockCols - 1) / kBlockCols;
  const WeightStream stream = {
      .begin = static_cast<const char*>(mm->weight) + mm->n_begin / kBlockCols * bytes,
      .lines = blocks * bytes / kLine,
      .next = static_cast<const char*>(mm->next),
  };
  // Tiles of nearly equal height: 13 rows are 7 + 6 and not 12 + 1.
  const size_t tiles = (mm->m + Tile::kRows - 1) / Tile::kRows;
  const size_t row_steps = (mm->m + Tile::kRowStep - 1) / Tile::kRowStep;
  const size_t height = (row_steps + tiles - 1) / tiles * Tile::kRowStep;
  size_t share = kStepLines;
  while (share > 1 && share / 2 * tiles >= kStepLines) share /= 2;
  const size_t run = tiles == 1 ? Tile::kLoneSteps : Tile::kSteps;
  for (size_t block = 0; block < blocks; ++block) {
    size_t count;
    for (size_t step = 0; step < steps; step += count) {
      count = steps - step < run ? steps - step : run;
      const size_t line = (block * steps + step) * kStepLines;
      for (size_t tile = 0; tile < tiles; ++tile) {
        const size_t row = tile * height;
        const size_t done = tile * count * share;
        Tile::run({
            .act = static_cast<const char*>(mm->act) + row * mm->act_stride +
                   step * kStepDepth * Tile::kActBytes,
            .act_stride = mm->act_stride,
            .weight = stream.begin + line * kLine,
            .rows = mm->m - row < height ? mm->m - row : height,
            .steps = count,
            .dst = mm->dst + row * mm->dst_stride + block * kBlockCols,
            .dst_stride = mm->dst_stride,
            .first = step == 0,
            .stream = &stream,
            .line = line + done,
            .lines_per_step = done < count * kStepLines ? share : 0,
        });
      }
    }
  }
}

}  // namespace
