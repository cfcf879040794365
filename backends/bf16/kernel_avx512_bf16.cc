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

#include "variant.h"

namespace {

inline __m512bh broadcast_pair(const char* pair) {
  int bits;
  memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

template <size_t kM, class Share>
void tile(const TileWork<Share>& work) {
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
    prefetch_step(work, step, weight);
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

  template <class Share>
  static void run(const TileWork<Share>& work) {
    static constexpr void (*kTiles[kRows])(const TileWork<Share>&) = {
        tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
        tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
    };
    kTiles[work.rows - 1](work);
  }
};

constexpr ktk_ukernel kUkernel = make_ukernel("gemm_12x32", matmul<Tile>);

}  // namespace

extern "C" {
extern const ktk_variant KTK_VARIANT(bf16);
constexpr ktk_variant KTK_VARIANT(bf16) = make_variant<ActBf16>(kUkernel);
}
