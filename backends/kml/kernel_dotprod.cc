// sdot: four sums of four products each. Eight k of a row, twice in a register, meet a register of
// weights, two columns of eight k:
//
//   sum:   column 0, k 0-3 | column 0, k 4-7 | column 1, k 0-3 | column 1, k 4-7
//
// whose neighbours are added at the end of a group. 6 rows x 8 columns take 24 registers of sums, 4
// of weights and one of a row. Up to 2 rows take turns between two sets, so that the latency of
// sdot (4 cycles, two in each) is hidden.
#include "kml/variant.h"

namespace ktk::kml {
namespace {

template <size_t kRows>
struct Sums {
  static constexpr size_t kSets = kRows <= 2 ? 2 : 1;
  int32x4_t v[kSets][kRows][4];

  Sums() {
#pragma GCC unroll 2
    for (size_t set = 0; set < kSets; ++set) {
#pragma GCC unroll 6
      for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) v[set][i][j] = vdupq_n_s32(0);
      }
    }
  }

  void add(const int8_t* line, const int8_t* const (&rows)[kRows], size_t k) {
    multiply(v[0], line, rows, k);
    multiply(v[kSets - 1], line + kLineBytes, rows, k + kLineDepth);
  }

  int32x4_t total(size_t row, size_t half) const {
    return vpaddq_s32(sum(row, 2 * half), sum(row, 2 * half + 1));
  }

 private:
  static void multiply(int32x4_t (&sums)[kRows][4], const int8_t* line,
                       const int8_t* const (&rows)[kRows], size_t k) {
    keep_order();
    const int8x16x4_t w = {
        {vld1q_s8(line), vld1q_s8(line + 16), vld1q_s8(line + 32), vld1q_s8(line + 48)}};
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i) {
      keep_order();
      const int8x16_t act =
          vreinterpretq_s8_s64(vld1q_dup_s64(reinterpret_cast<const int64_t*>(rows[i] + k)));
#pragma GCC unroll 4
      for (size_t j = 0; j < 4; ++j) sums[i][j] = vdotq_s32(sums[i][j], w.val[j], act);
    }
  }

  int32x4_t sum(size_t i, size_t j) const {
    return kSets == 2 ? vaddq_s32(v[0][i][j], v[kSets - 1][i][j]) : v[0][i][j];
  }
};

struct Variant {
  using Weight = WeightCodec;
  using Act = kml::Act;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_6x8_dotprod", gemm<Kernel<Sums, 6>>)};
};

}  // namespace
}  // namespace ktk::kml

KTK_EXPORT_VARIANT(kml, ktk::kml::Variant)
