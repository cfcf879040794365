// BF16 with AMX: bf16 rows, 2 x 2 tiles of 16 x 16 sums; tdpbf16ps for any number of rows.
//
//                          B: step of the packed weight
//                          tmm6            tmm7
//   A: rows 0..15   tmm4   tmm0            tmm1
//      rows 16..31  tmm5   tmm2            tmm3
//
// Four tile loads (64 cache lines) feed four products (64 cycles). Up to 16 rows, which wait for
// memory anyway, are multiplied with two blocks of columns at once: 1 x 4 tiles.
#include <immintrin.h>
#include <string.h>

#include "bf16/variant.h"
#include "gemm/amx.h"

namespace ktk::bf16 {
namespace {

constexpr size_t kTileRows = 16;

template <class Share>
inline void one_by_two(const TileWork<Share>& work) {
  const size_t dst_bytes = work.dst_stride * sizeof(float);
  if (work.first) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, work.dst, dst_bytes);
    _tile_loadd(1, work.dst + kTileCols, dst_bytes);
  }
  const char* act = work.act;
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step) {
    prefetch_step(work, step, weight);
    _tile_loadd(6, weight, kLine);
    _tile_loadd(4, act, work.act_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + kTileBytes, kLine);
    _tile_dpbf16ps(1, 4, 7);
    act += kLine;
    weight += kStepBytes;
  }
  _tile_stored(0, work.dst, dst_bytes);
  _tile_stored(1, work.dst + kTileCols, dst_bytes);
}

// Up to 16 rows times two blocks, all their steps: act is loaded for four tiles of weights, not
// two. It comes from L2, where it competes with the weights for the buffers of L1.
inline void one_by_four(const TileWork<NearShare>& work, size_t block_bytes) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char* act = work.act;
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step) {
    const char* second = weight + block_bytes;
    prefetch_step(work, step, weight);
    _tile_loadd(4, act, work.act_stride);
    _tile_loadd(6, weight, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + kTileBytes, kLine);
    _tile_dpbf16ps(1, 4, 7);
    prefetch_step(work, step, second);
    _tile_loadd(6, second, kLine);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, second + kTileBytes, kLine);
    _tile_dpbf16ps(3, 4, 7);
    act += kLine;
    weight += kStepBytes;
  }
  const size_t dst_bytes = work.dst_stride * sizeof(float);
  _tile_stored(0, work.dst, dst_bytes);
  _tile_stored(1, work.dst + kTileCols, dst_bytes);
  _tile_stored(2, work.dst + 2 * kTileCols, dst_bytes);
  _tile_stored(3, work.dst + 3 * kTileCols, dst_bytes);
}

template <class Share>
inline void two_by_two(const TileWork<Share>& work) {
  const size_t dst_bytes = work.dst_stride * sizeof(float);
  float* lower = work.dst + kTileRows * work.dst_stride;
  if (work.first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, work.dst, dst_bytes);
    _tile_loadd(1, work.dst + kTileCols, dst_bytes);
    _tile_loadd(2, lower, dst_bytes);
    _tile_loadd(3, lower + kTileCols, dst_bytes);
  }
  const char* act = work.act;
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step) {
    prefetch_step(work, step, weight);
    _tile_loadd(6, weight, kLine);
    _tile_loadd(4, act, work.act_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + kTileBytes, kLine);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, act + kTileRows * work.act_stride, work.act_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    act += kLine;
    weight += kStepBytes;
  }
  _tile_stored(0, work.dst, dst_bytes);
  _tile_stored(1, work.dst + kTileCols, dst_bytes);
  _tile_stored(2, lower, dst_bytes);
  _tile_stored(3, lower + kTileCols, dst_bytes);
}

struct Tile {
  static constexpr size_t kRows = 2 * kTileRows;
  static constexpr size_t kRowStep = kTileRows;
  static constexpr size_t kSteps =
      8;  // 16 KiB of weights: 32 KiB leave too little L1 to act and dst
  static constexpr size_t kLoneSteps = SIZE_MAX;
  static constexpr size_t kActBytes = 2;

  template <class Share>
  static void run(const TileWork<Share>& work) {
    if (work.rows <= kTileRows) {
      one_by_two(work);
    } else {
      two_by_two(work);
    }
  }
};

// The product for up to 16 rows: pairs of blocks, and perhaps a last one alone.
void matmul_pairs(const ktk_matmul* mm) {
  const size_t bytes = block_bytes(mm->matrix);
  const WeightStream stream = weight_stream(mm);
  TileWork<NearShare> work = {
      .act = static_cast<const char*>(mm->act),
      .act_stride = mm->act_stride,
      .weight = stream.begin,
      .rows = mm->m,
      .steps = num_steps(mm->matrix),
      .dst = mm->dst,
      .dst_stride = mm->dst_stride,
      .first = true,
      .stream = {},
  };
  for (size_t n = mm->n_begin; n < mm->n_end; n += 2 * kBlockCols) {
    if (n + 2 * kBlockCols >= mm->n_end) stream.begin_next();
    if (n + kBlockCols < mm->n_end) {
      one_by_four(work, bytes);
    } else {
      one_by_two(work);
    }
    work.weight += 2 * bytes;
    work.dst += 2 * kBlockCols;
  }
}

void run(const ktk_matmul* mm) {
  const ktk::TileRows rows(mm->m);
  ktk::tile_memory_barrier();
  if (mm->m <= kTileRows) {
    matmul_pairs(mm);
  } else {
    matmul<Tile, NearShare, FarShare>(mm);
  }
}

struct Variant : AmxVariant {
  using Weight = WeightCodec;
  using Act = ActBf16;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_32x32", run)};
};

}  // namespace
}  // namespace ktk::bf16

KTK_EXPORT_VARIANT(bf16, ktk::bf16::Variant)
