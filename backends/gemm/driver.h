// The loops around a register tile, the same for every kernel:
//
//   for each block of nr columns                 one sequential stream of weights
//     for each run of up to kc of depth            stays in L1 ...
//       for each tile of rows                        ... while all rows of act, from L2, pass it
//
// Rows are dealt out evenly: 13 are 7 + 6 and not 12 + 1. Where tiles would have too few sums for
// the multiplier (ktk_prefetch.accumulators), and a kernel has a form for few rows that has more of
// them for each row, a last tile takes that: 8 are 5 + 3 and not 4 + 4. Tiles that read the same
// run share fetching what comes next (prefetch.h): each fetches a part of it while it computes. A
// single tile, which does not come back to weights, has no runs.
//
// Between two runs partial sums rest in dst. So that a row has the same bits in any batch, the sums
// of a tile must be one chain of additions over ascending k, wherever runs are cut.
//
// A kernel states
//
//   kMr                      most rows of a tile
//   kRowStep                 rows that a tile is made of (16 for AMX); 1 if it does not say
//   kNr                      columns of a block
//   kLineProducts            lines of operands that a line of weights becomes for the multiplier: 1
//                            for bf16 or int8 as they are, 2 for bf16 that becomes f32 ...
//   Kernel(mm)               what it keeps for a whole product
//   passes(rows)             how often a tile of so many rows goes over a run, for some columns
//                            of the block each time
//   slabs()                  the depth in units that runs may be cut at
//   offset(slab)             where a slab is in a block, perhaps behind a header; offset(slabs())
//                            bytes are a block
//   kRowSums, kShortRows     where there is a form for few rows with more sums for each of them:
//                            independent sums of a row in the other form, and the most rows of that
//                            one; kRowStep is 1
//   kRunSlabs, or kRunBytes  a run, if it shall be other than what stays in L1
//   kSharedRunBytes          the same, where several tiles of rows pass it
//   kAloneRunSlabs           a run of a kernel that decodes, where there is a single tile of rows
//   tile(tile)               adds the products of a run, in all passes
//   begin_block(block, dst)  if there is anything to do ahead of the runs of a block,
//   prepare_run(run)         ahead of the tiles of a run,
//   kFetchesNextRun          prepare_run reads all of a run, more than L1 holds: tiles then fetch
//                            the run after theirs, into L2, however short the distance for others
//   begin_run(run, fetch)    ahead of the tiles of a run, which then do not fetch: they multiply
//                            what this decodes,
//   end_block(n, dst)        and after the runs
#pragma once

#include "gemm/prefetch.h"
#include "gemm/rows.h"

namespace ktk {
namespace {

// Slabs [begin, end) of a block.
struct Run {
  const char* block;
  size_t begin, end;
};

// What one call of a tile works on.
struct Tile : Run {
  const char* act;  // first row
  size_t act_stride;
  size_t rows;
  size_t columns;  // that are wanted of the block: more may be computed
  float* dst;      // first row, first column of the block
  size_t dst_stride;
  Fetch fetch;
  BulkFetch bulk_fetch;  // the same, for those that prefer it
  bool in_order;         // if there is a form that uses weights in the order of memory, that one
  bool from_memory;      // no other tile reads the same weights

  bool is_first() const { return begin == 0; }
};

constexpr size_t kRunBytes = 16384;  // half of the smallest L1

template <class Kernel>
constexpr bool states_runs() {
  return requires { Kernel::kRunSlabs; } || requires { Kernel::kRunBytes; };
}

template <class Kernel>
constexpr size_t row_step() {
  if constexpr (requires { Kernel::kRowStep; }) return Kernel::kRowStep;
  return 1;
}

// How many slabs a run has: what stays in L1, or all of the depth.
template <class Kernel>
inline size_t run_slabs(const Kernel& kernel, bool is_alone) {
  const size_t slabs = kernel.slabs();
  if constexpr (requires { Kernel::kAloneRunSlabs; }) {
    if (is_alone) return smaller(Kernel::kAloneRunSlabs, slabs);
  }
  if constexpr (requires { Kernel::kRunSlabs; }) return smaller(Kernel::kRunSlabs, slabs);
  size_t most = kRunBytes;
  if constexpr (requires { Kernel::kRunBytes; }) {
    most = Kernel::kRunBytes;
  } else if (is_alone) {
    return slabs;
  } else if constexpr (requires { Kernel::kSharedRunBytes; }) {
    most = Kernel::kSharedRunBytes;
  }
  const size_t bytes = kernel.offset(1) - kernel.offset(0);
  return smaller(most > bytes ? most / bytes : 1, slabs);
}

// Where the run that begins at a slab ends. A last one of hardly more than loads and stores of
// sums, such as where an adapter's rank follows weights, goes along with the one before.
template <class Kernel>
inline size_t run_end(size_t begin, size_t run, size_t slabs) {
  const size_t with_last = states_runs<Kernel>() ? run : run + run / 4;
  return slabs - begin <= with_last ? slabs : begin + run;
}

// The tiles that rows are dealt out to.
template <class Kernel>
struct Tiles {
  static constexpr size_t kStep = row_step<Kernel>();
  size_t rows, count, short_rows = 0;

  explicit Tiles(const ktk_matmul* mm) : rows(mm->m), count(ceil_div(rows, Kernel::kMr)) {
    if constexpr (requires { Kernel::kShortRows; }) {
      static_assert(kStep == 1);
      const size_t least = ceil_div(mm->prefetch->accumulators, Kernel::kRowSums);
      if (count > 1 && rows / count < least && least <= Kernel::kMr) {
        // At least one row, since other tiles do not hold all. They must hold the rest.
        const size_t few = smaller(Kernel::kShortRows, rows - (count - 1) * least);
        if (rows - few <= (count - 1) * Kernel::kMr) short_rows = few;
      }
    }
  }
  // Where the rows of a tile end.
  size_t end(size_t tile) const {
    const size_t alike = count - (short_rows > 0);
    if (tile >= alike) return rows;
    return smaller((ceil_div(rows, kStep) - short_rows) * (tile + 1) / alike * kStep, rows);
  }
};

template <class Kernel>
inline void gemm(const ktk_matmul* mm) {
  constexpr bool kDecodes = requires(Kernel k, Run r, Fetch f) { k.begin_run(r, f); };
  Kernel kernel(mm);
  const size_t slabs = kernel.slabs(), block_bytes = kernel.offset(slabs);
  const WeightStream stream =
      weight_stream(mm, Kernel::kNr, block_bytes, mm->n_begin / Kernel::kNr * block_bytes);
  const Tiles<Kernel> dealt(mm);
  const size_t tiles = dealt.count;
  const bool is_alone = tiles == 1 && kernel.passes(mm->m) == 1;
  const size_t run = run_slabs(kernel, is_alone);
  const ktk_fetch& policy =
      kDecodes ? mm->prefetch->decode : fetch_policy(mm, tiles, Kernel::kLineProducts);
  constexpr bool kNextRun = requires { Kernel::kFetchesNextRun; };
  size_t ahead = policy.ahead;
  if (kNextRun && ahead > 0 && ahead < kernel.offset(run)) ahead = kernel.offset(run);
  const uint16_t cache = kNextRun ? uint16_t{KTK_FETCH_L2} : policy.cache;
  // By pages: a tile that uses each line once, or two tiles, where products do not bind. Not AMX,
  // which has BulkFetch, nor kernels whose tiles read what prepare_run() decoded.
  constexpr bool kIsVector = row_step<Kernel>() == 1 && !kDecodes && !kNextRun;
  // What is prepared for a run is used beside each product, which takes about as long again, and
  // two tiles for so long that fetching in order keeps up.
  constexpr bool kPrepares = requires(Kernel k, Run r) { k.prepare_run(r); };
  constexpr size_t kWork = Kernel::kLineProducts * (kPrepares ? 2 : 1);
  const bool is_shared = tiles == 2;
  const bool in_pages = kIsVector && ahead > 0 && policy.order == KTK_FETCH_BY_PAGES &&
                        mm->m * kWork <= mm->prefetch->pages_products &&
                        ((is_shared && !kPrepares && cache == KTK_FETCH_L2) ||
                         (is_alone && cache == KTK_FETCH_L2_THEN_L1));
  const size_t l1_ahead = mm->prefetch->l1_ahead;
  // For tiles that fetch `step` bytes for every line that they use, from `offset` on.
  const auto fetch_from = [&](size_t offset, size_t step) {
    const char* const line = stream.at(offset + ahead);
    const char* const l1_line = stream.at(offset + l1_ahead);
    if (in_pages && stretch_at(stream, offset + ahead).whole) {
      return is_shared ? Fetch::shared_pages(line, step) : Fetch::pages(line, l1_line);
    }
    return Fetch::in_order(line, ahead ? step : 0, cache, l1_line);
  };
  Tile tile;
  tile.act_stride = mm->act_stride;
  tile.dst_stride = mm->dst_stride;
  tile.in_order = !kDecodes && uses_in_order(mm, Kernel::kLineProducts);
  tile.from_memory = tiles == 1;
  size_t block_offset = 0;
  for (size_t n = mm->n_begin; n < mm->n_end; n += Kernel::kNr, block_offset += block_bytes) {
    tile.block = stream.begin + block_offset;
    float* const dst = mm->dst + (n - mm->n_begin);
    tile.columns = smaller(mm->n_end - n, Kernel::kNr);
    Fetch header = fetch_from(block_offset, kLine);
    for (size_t at = 0; at < kernel.offset(0); at += kLine) header.next();
    if constexpr (requires { kernel.begin_block(tile.block, dst); }) {
      kernel.begin_block(tile.block, dst);
    }
    for (tile.begin = 0; tile.begin < slabs; tile.begin = tile.end) {
      tile.end = run_end<Kernel>(tile.begin, run, slabs);
      const size_t offset = block_offset + kernel.offset(tile.begin);
      // What follows the last block is elsewhere: a run ends where fetching comes to it, and where
      // the order changes. Not where runs are decoded, which are short, and as long as tiles want
      // them.
      const size_t turn = in_pages                        ? stretch_at(stream, offset + ahead).end
                          : offset + ahead < stream.bytes ? stream.bytes
                                                          : SIZE_MAX;
      while ((is_alone || in_pages) && !kDecodes && tile.end > tile.begin + 1 &&
             block_offset + kernel.offset(tile.end - 1) + ahead >= turn) {
        --tile.end;
      }
      const size_t bytes = block_offset + kernel.offset(tile.end) - offset;
      if constexpr (requires { kernel.prepare_run(tile); }) kernel.prepare_run(tile);
      if constexpr (kDecodes) kernel.begin_run(tile, fetch_from(offset, kLine));
      const size_t step = ceil_div(kLine, tiles);
      for (size_t i = 0, row = 0; i < tiles; ++i) {
        const size_t row_end = dealt.end(i);
        const size_t share = offset + i * (bytes / tiles);
        tile.act = static_cast<const char*>(mm->act) + row * mm->act_stride;
        tile.rows = row_end - row;
        tile.dst = dst + row * mm->dst_stride;
        tile.fetch = fetch_from(share, step);
        tile.bulk_fetch = {stream, share + ahead, tile.fetch.step, cache == KTK_FETCH_L1,
                           policy.order == KTK_FETCH_BY_PAGES};
        kernel.tile(tile);
        row = row_end;
      }
    }
    if constexpr (requires { kernel.end_block(n, dst); }) kernel.end_block(n, dst);
  }
}

}  // namespace
}  // namespace ktk
