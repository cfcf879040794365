// 256-bit vpdpbusd in its VEX form, for CPUs that have it without AVX-512.
#include <immintrin.h>

#include "probe/loop.h"
#include "probe/unit.h"

namespace {

constexpr int kChains = 12;

void run_vnni(size_t iterations) {
  __m256i a = _mm256_set1_epi8(93);
  opaque(a);
  run_chains<kChains, __m256i>(iterations,
                               [=](__m256i acc) { return _mm256_dpbusd_avx_epi32(acc, a, a); });
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "avx_vnni",
     .act_bits = 8,
     .weight_bits = 8,
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX_VNNI,
     .ops = kChains * 64,
     .run = run_vnni},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {1, kUnits};
