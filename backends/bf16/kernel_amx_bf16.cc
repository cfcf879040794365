// BF16 with AMX: bf16 rows, 2 x 2 tiles of 16 x 16 sums; tdpbf16ps for any number of rows.
//
//                          B: step of the packed weight
//                          tmm6            tmm7
//   A: rows 0..15   tmm4   tmm0            tmm1
//      rows 16..31  tmm5   tmm2            tmm3
//
// Four tile loads (64 cache lines) feed four products (64 cycles). Up to 16 rows use the upper half
// only: they wait for memory anyway.
#include <immintrin.h>
#include <string.h>

#include "act_codec.h"
#include "ktk/target.h"
#include "loops.h"
#include "weight_codec.h"

namespace {

constexpr size_t kTileRows = 16;

// gcc 12 does not know what the tile intrinsics read: stores before them must not sink below.
inline void compiler_fence() { asm volatile("" ::: "memory"); }

void enter() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kLine;
    config.rows[i] = kTileRows;
  }
  compiler_fence();
  _tile_loadconfig(&config);
}

void leave() { _tile_release(); }

inline void one_by_two(const TileWork& work) {
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
    prefetch_step(work, step);
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

inline void two_by_two(const TileWork& work) {
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
    prefetch_step(work, step);
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

  static void run(const TileWork& work) {
    compiler_fence();
    if (work.rows <= kTileRows) {
      one_by_two(work);
    } else {
      two_by_two(work);
    }
  }
};

constexpr ktk_ukernel kUkernels[] = {
    {
        .struct_size = sizeof(ktk_ukernel),
        .name = "gemm_32x32",
        .m_max = SIZE_MAX,
        .scratch_size = nullptr,
        .run = matmul<Tile>,
    },
};

}  // namespace

extern "C" const ktk_variant KTK_VARIANT(bf16);
extern "C" const ktk_variant KTK_VARIANT(bf16) = {
    .struct_size = sizeof(ktk_variant),
    .name = KTK_STRING(KTK_TARGET),
    .required_isa = KTK_TARGET_ISA,
    .tile = {.m_step = kTileRows, .n_step = kBlockCols, .k_step = kStepDepth},
    .act = {.element = KTK_BF16, .scale = KTK_NONE, .zero = KTK_NONE, .group_n = 0, .group_k = 0},
    .layout = kLayout,
    .weight_size = weight_size,
    .pack_weight = pack_weight,
    .unpack_weight = unpack_weight,
    .act_size = act_size<2>,
    .pack_act = pack_act_bf16,
    .unpack_act = unpack_act_bf16,
    .ukernels = kUkernels,
    .num_ukernels = sizeof kUkernels / sizeof *kUkernels,
    .enter = enter,
    .leave = leave,
    .weight_offset = weight_offset,
};
