// BF16 with AMX: bf16 rows, 2 x 2 tiles of 16 x 16 sums (gemm/amx.h), for any number of rows.
//
// Up to 16 rows, which wait for memory anyway, are multiplied with two blocks of columns at once:
// 1 x 4 tiles.
#pragma once

#include "bf16/kernel.h"
#include "gemm/amx.h"

namespace ktk::bf16 {
namespace {

template <bool kBothHalves>
inline void multiply_tile(const Tile& t) {
  if (t.is_first()) {
    zero_sums<kBothHalves>();
  } else {
    load_sums<kBothHalves>(t.dst, t.dst_stride);
  }
  BulkFetch fetch = t.bulk_fetch;
  const char* act = first_act<2>(t);
  const char* weight = first_weight(t);
  for (size_t slab = t.begin; slab < t.end; ++slab, act += kLine, weight += kStepBytes) {
    fetch.next(kStepLines);
    add_tiles<TilesBf16, kBothHalves>(act, t.act_stride, weight, kTileBytes);
  }
  store_sums<kBothHalves>(t.dst, t.dst_stride);
}

struct AmxKernel : KernelBase {
  using KernelBase::KernelBase;
  static constexpr size_t kMr = 2 * kAmxRows;
  static constexpr size_t kRowStep = kAmxRows;
  static constexpr size_t kLineProducts = 1;
  // Of the 48 KiB of L1 that CPUs with AMX have: sums move half as often as with half of it.
  static constexpr size_t kSharedRunBytes = 32768;

  static size_t passes(size_t) { return 1; }
  static void tile(const Tile& t) {
    if (t.rows <= kAmxRows) {
      multiply_tile<false>(t);
    } else {
      multiply_tile<true>(t);
    }
  }
};

// Up to 16 rows times two blocks, all their steps: act is loaded for four tiles of weights, not
// two. It comes from L2, where it competes with the weights for the buffers of L1.
inline void one_by_four(const ktk_matmul* mm, const char* weight, float* dst, BulkFetch fetch) {
  const size_t steps = num_steps(mm->matrix), block_bytes = bf16::block_bytes(mm->matrix);
  BulkFetch second_fetch = fetch;
  second_fetch.offset += block_bytes;
  zero_sums<true>();
  const char* act = static_cast<const char*>(mm->act);
  for (size_t step = 0; step < steps; ++step, act += kLine, weight += kStepBytes) {
    const char* second = weight + block_bytes;
    fetch.next(kStepLines);
    add_tiles<TilesBf16, false>(act, mm->act_stride, weight, kTileBytes);
    second_fetch.next(kStepLines);
    _tile_loadd(6, second, kLine);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, second + kTileBytes, kLine);
    _tile_dpbf16ps(3, 4, 7);
  }
  const size_t dst_bytes = mm->dst_stride * sizeof(float);
  _tile_stored(0, dst, dst_bytes);
  _tile_stored(1, dst + kTileCols, dst_bytes);
  _tile_stored(2, dst + 2 * kTileCols, dst_bytes);
  _tile_stored(3, dst + 3 * kTileCols, dst_bytes);
}

// The product for up to 16 rows: pairs of blocks, and perhaps a last one alone.
void gemm_pairs(const ktk_matmul* mm) {
  const size_t bytes = block_bytes(mm->matrix);
  const WeightStream stream = weight_stream(mm, kNr, bytes, weight_offset(mm->matrix, mm->n_begin));
  const ktk_fetch& policy = mm->prefetch->one;
  ktk_matmul last = *mm;
  for (; last.n_begin + kNr < mm->n_end; last.n_begin += 2 * kNr) {
    const size_t offset = (last.n_begin - mm->n_begin) / kNr * bytes;
    one_by_four(mm, stream.begin + offset, last.dst,
                {stream, offset + policy.ahead, policy.ahead ? kLine : 0,
                 policy.cache == KTK_FETCH_L1, false});
    last.dst += 2 * kNr;
  }
  if (last.n_begin < mm->n_end) gemm<AmxKernel>(&last);
}

void run_amx(const ktk_matmul* mm) {
  const TileRows rows(mm->m);
  tile_memory_barrier();
  if (mm->m <= kAmxRows) {
    gemm_pairs(mm);
  } else {
    gemm<AmxKernel>(mm);
  }
  // gcc 12 takes the upper halves of registers for zero behind a call of a function in its file,
  // which they are not after copies of `mm`: code for SSE that follows would be slow.
  _mm256_zeroupper();
}

}  // namespace
}  // namespace ktk::bf16
