// 512-bit vpdpbusd and vpdpwssd.
#include <immintrin.h>

#include "probe/loop.h"
#include "probe/unit.h"

namespace {

constexpr int kChains = 16;

void run_vnni(size_t iterations) {
  __m512i a = _mm512_set1_epi8(93);
  opaque(a);
  run_chains<kChains, __m512i>(iterations,
                               [=](__m512i acc) { return _mm512_dpbusd_epi32(acc, a, a); });
}

void run_words(size_t iterations) {
  __m512i a = _mm512_set1_epi16(93);
  opaque(a);
  run_chains<kChains, __m512i>(iterations,
                               [=](__m512i acc) { return _mm512_dpwssd_epi32(acc, a, a); });
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "avx512_vnni_words",
     .act_bits = 16,
     .weight_bits = 8,
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI,
     .ops = kChains * 64,
     .run = run_words},
    {.name = "avx512_vnni",
     .act_bits = 8,
     .weight_bits = 8,
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI,
     .ops = kChains * 128,
     .run = run_vnni},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {2, kUnits};
