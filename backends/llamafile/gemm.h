// The product. A tile of rows passes over a run of 32 columns at a time: strictly in the order of
// memory if it is the only one, and over a run that stays in L1 if there are several. One and two
// rows have kernels of their own where registers are long (gemv.h).
#pragma once

#include "ktk/backend.h"
#include "llamafile/either.h"
#include "llamafile/floats/gemm.h"
#include "llamafile/gemm_tile.h"
#include "llamafile/run_sums.h"
#if defined(__AVX512VNNI__)
#include "llamafile/gemv.h"
#endif

namespace ktk::llamafile {
namespace {

// Tiles of a type, by their number of rows.
struct Kernels {
  const MultiplyTile* of_rows;
  size_t max_rows;
};

template <int kBits, class Shape>
inline Kernels kernels() {
  constexpr int kMaxRows = Shape::kHalves ? Dot::kMaxHalfRows : Dot::kMaxRows;
  return {kTiles<kBits, Shape, kMaxRows>.of_rows, kMaxRows};
}

inline Kernels kernels_for(const BlockType& type) {
  const bool pairs = pairs_units(type);
  switch (type.bits) {
    case 2:
      return type.has_dmin ? kernels<2, HalvesMins>() : kernels<2, Plain>();
    case 3:
      return pairs ? kernels<3, PairsHalves>() : kernels<3, Plain>();
    case 4:
      if (type.group == 16) return kernels<4, Halves>();
      if (pairs) return kernels<4, PairsMins>();
      return type.has_dmin ? kernels<4, Mins>() : kernels<4, Plain>();
    case 5:
      if (pairs) return kernels<5, PairsMins>();
      return type.has_dmin ? kernels<5, Mins>() : kernels<5, Plain>();
    case 6:
      return kernels<6, PairsHalves>();
    default:
      return kernels<8, Plain>();
  }
}

inline void clear_rows(float* dst, size_t dst_stride, size_t m) {
  for (size_t r = 0; r < m; ++r, dst += dst_stride) {
    for (size_t i = 0; i < kNr; i += Dot::kLanes) Dot::store(dst + i, Dot::set1(0));
  }
}

inline const uint8_t* block_at(const ktk_matmul* mm, size_t n) {
  return static_cast<const uint8_t*>(mm->weight) + weight_offset(mm->matrix, n);
}

// Columns [n_begin, n_end) of the packed matrix, which are contiguous.
inline WeightStream weight_stream(const ktk_matmul* mm) {
  const size_t columns = round_up(mm->n_end - mm->n_begin, kNr);
  return {
      .begin = reinterpret_cast<const char*>(block_at(mm, mm->n_begin)),
      .lines = weight_offset(mm->matrix, columns) / kLine,
      .next = static_cast<const char*>(mm->next),
  };
}

// How far ahead of its use a lone tile fetches memory. It leads the prefetcher of L2: from close by
// when it waits for memory, from further away when it computes as long.
inline size_t bytes_ahead(const BlockType& type, size_t rows) {
  return 2 * rows <= type.bits ? 512 : 8192;
}

inline void multiply(const ktk_matmul* mm) {
  const BlockLayout layout(mm->matrix);
  const Kernels kernels = kernels_for(layout.type);
  const CodeTable table(layout.type);
#if defined(__AVX512VNNI__)
  if (const RunGemv gemv = gemv_for(layout.type, mm->m)) {
    return gemv(mm, table, weight_stream(mm));
  }
#endif
  const size_t row_tiles = (mm->m + kernels.max_rows - 1) / kernels.max_rows;
  const size_t tiles = row_tiles * (kNr / kTileNr);
  const bool is_lone = tiles == 1;
  const WeightStream stream = weight_stream(mm);
  // A lone tile fetches line by line. Several share fetching the next run.
  const size_t codes_bytes = kSubBlocks * sub_block_bytes(layout.type);
  const size_t super_block_bytes = layout.whole.end + codes_bytes;
  const size_t share = is_lone ? 0 : super_block_bytes / tiles + 1;
  const size_t distance = is_lone ? bytes_ahead(layout.type, mm->m) : super_block_bytes;
  const uint8_t* run = block_at(mm, mm->n_begin);
  alignas(kLine) float params[kSubBlocks * kMaxParams];
  alignas(kLine) float sums[Dot::kMaxHalfRows * kNr];
  const bool is_summed = sums_runs(layout.type);
  TileArgs t = {};
  t.table = &table;
  t.act_stride = mm->act_stride;
  t.dst_stride = is_summed ? kNr : mm->dst_stride;
  t.prefetch_step = is_lone ? kLine : share * kLine * kNr / kTileNr / codes_bytes + 1;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kNr) {
    float* dst = mm->dst + (n - mm->n_begin);
    clear_rows(dst, mm->dst_stride, mm->m);
    for (size_t unit = 0; unit < layout.sub_blocks; unit += t.units) {
      t.units = smaller(kSubBlocks, layout.sub_blocks - unit);
      const Header& at = layout.header_of(t.units);
      const uint8_t* codes = run + at.end;
      size_t ahead =
          static_cast<size_t>(reinterpret_cast<const char*>(run) - stream.begin) + distance;
      if (is_lone) {
        for (const uint8_t* line = run; line != codes; line += kLine) prefetch_l2(line + distance);
        ahead += at.end;
      }
      load_params(layout.type, at, run, t.units, params);
      // Rows are dealt out evenly: 13 are 7 + 6, not 12 + 1.
      for (size_t i = 0, row = 0; i < row_tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / row_tiles;
        const uint8_t* act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        t.act = act + unit * kSubBlock;
        t.factors = act + group_offset(mm->matrix) + unit * sizeof(ActGroup);
        float* const to = dst + row * mm->dst_stride;
        if (is_summed) clear_rows(sums, kNr, row_end - row);
        for (size_t c = 0; c < kNr; c += kTileNr, ahead += share) {
          t.prefetch = reinterpret_cast<const uint8_t*>(stream.at(ahead / kLine));
          t.codes = codes + 4 * c;
          t.params = params + c;
          t.dst = (is_summed ? sums : to) + c;
          kernels.of_rows[row_end - row](t);
        }
        if (is_summed) add_run(layout.type, run, sums, row_end - row, to, mm->dst_stride);
        row = row_end;
      }
      run = codes + t.units * sub_block_bytes(layout.type);
    }
  }
}

constexpr ktk_ukernel kUkernels[] = {
    ukernel("tiles", either<multiply, floats::multiply<Dot>>),
};

}  // namespace
}  // namespace ktk::llamafile
