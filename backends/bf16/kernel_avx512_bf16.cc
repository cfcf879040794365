// BF16 with vdpbf16ps: bf16 rows, a register tile of up to 12 rows x 32 columns.
//
// A pair of act values is broadcast from memory and multiplied with the pairs of 32 columns:
//
//            zmm        columns c..c+15    c+16..c+31
//   row 0:   pair of k  acc[0][0]          acc[0][1]
//   ...
//   row 11:  pair of k  acc[11][0]         acc[11][1]      24 sums, 2 weights, the rest broadcasts
//
// 24 independent sums hide the latency of two vdpbf16ps a cycle (Zen 5); 14 loads for 24 products
// keep within two loads a cycle.
#include <immintrin.h>
#include <string.h>

#include "act_codec.h"
#include "ktk/target.h"
#include "loops.h"
#include "weight_codec.h"

namespace {

inline __m512bh broadcast_pair(const char* pair) {
  int bits;
  memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

template <size_t kM>
void tile(const TileWork& work) {
  // Four row pointers, three rows apart, and the stride times 0, 1, 2: addressing modes do the
  // rest.
  const size_t stride = work.act_stride;
  const char* act[(kM + 2) / 3];
  __m512 acc[kM][2];
#pragma GCC unroll 4
  for (size_t i = 0; i < (kM + 2) / 3; ++i) act[i] = work.act + i * 3 * stride;
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
    const float* dst = work.dst + i * work.dst_stride;
    acc[i][0] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
    acc[i][1] = work.first ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + kTileCols);
  }
  const char* weight = work.weight;
  for (size_t step = 0; step < work.steps; ++step, weight += kTileBytes) {
    prefetch_step(work, step);
    for (const char* end = weight + kTileBytes; weight != end; weight += kLine) {
      const __m512bh w0 = (__m512bh)_mm512_load_si512(weight);
      const __m512bh w1 = (__m512bh)_mm512_load_si512(weight + kTileBytes);
#pragma GCC unroll 12
      for (size_t i = 0; i < kM; ++i) {
        const __m512bh a = broadcast_pair(act[i / 3] + i % 3 * stride);
        acc[i][0] = _mm512_dpbf16_ps(acc[i][0], w0, a);
        acc[i][1] = _mm512_dpbf16_ps(acc[i][1], w1, a);
      }
#pragma GCC unroll 4
      for (size_t i = 0; i < (kM + 2) / 3; ++i) act[i] += sizeof(uint32_t);
    }
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kM; ++i) {
    float* dst = work.dst + i * work.dst_stride;
    _mm512_storeu_ps(dst, acc[i][0]);
    _mm512_storeu_ps(dst + kTileCols, acc[i][1]);
  }
}

struct Tile {
  static constexpr size_t kRows = 12;
  static constexpr size_t kRowStep = 1;
  static constexpr size_t kSteps = 8;  // 16 KiB of weights
  static constexpr size_t kLoneSteps = SIZE_MAX;
  static constexpr size_t kActBytes = 2;

  static void run(const TileWork& work) {
    static constexpr void (*kTiles[kRows])(const TileWork&) = {
        tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
        tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
    };
    kTiles[work.rows - 1](work);
  }
};

constexpr ktk_ukernel kUkernels[] = {
    {
        .struct_size = sizeof(ktk_ukernel),
        .name = "gemm_12x32",
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
    .tile = {.m_step = 1, .n_step = kBlockCols, .k_step = kStepDepth},
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
    .enter = nullptr,
    .leave = nullptr,
    .weight_offset = weight_offset,
};
