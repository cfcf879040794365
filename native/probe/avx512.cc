// 512-bit units without extensions: f32 FMA, and multiply-adds of 16 and 8 bits, as in avx2.cc.
#include <immintrin.h>

#include "probe/loop.h"
#include "probe/unit.h"

namespace {

constexpr int kChains = 16;

void run_fma(size_t iterations) {
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.25f);
  opaque(a);
  opaque(b);
  run_chains<kChains, __m512>(iterations, [=](__m512 acc) { return _mm512_fmadd_ps(a, b, acc); });
}

void run_madd(size_t iterations) {
  __m512i a = _mm512_set1_epi16(93);
  run_chains<kChains, __m512i>(iterations, [a](__m512i acc) mutable {
    opaque(a);  // each time, or one product serves them all
    return _mm512_add_epi32(acc, _mm512_madd_epi16(a, a));
  });
}

void run_maddubs(size_t iterations) {
  __m512i a = _mm512_set1_epi8(3);
  run_chains<kChains, __m512i>(iterations, [a](__m512i acc) mutable {
    opaque(a);
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(a, a));
  });
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "avx512_fma",
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX512,
     .ops = kChains * 32,
     .run = run_fma},
    {.name = "avx512_bw",
     .act_bits = 16,
     .weight_bits = 8,
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX512,
     .ops = kChains * 64,
     .run = run_madd},
    {.name = "avx512_maddubs",
     .act_bits = 8,
     .weight_bits = 6,
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX512,
     .ops = kChains * 128,
     .run = run_maddubs},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {3, kUnits};
