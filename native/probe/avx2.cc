// 256-bit units: f32 FMA, the 16-bit multiply-add that int8 kernels without VNNI are made of, and
// the 8-bit one of weights with fewer bits.
#include <immintrin.h>

#include "probe/loop.h"
#include "probe/unit.h"

namespace {

constexpr int kChains = 12;  // of 16 registers

void run_fma(size_t iterations) {
  __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.25f);
  opaque(a);
  opaque(b);
  run_chains<kChains, __m256>(iterations, [=](__m256 acc) { return _mm256_fmadd_ps(a, b, acc); });
}

// The sum of two products goes to 32 bits, so a kernel needs the addition as well.
void run_madd(size_t iterations) {
  __m256i a = _mm256_set1_epi16(93);
  run_chains<kChains, __m256i>(iterations, [a](__m256i acc) mutable {
    opaque(a);  // each time, or one product serves them all
    return _mm256_add_epi32(acc, _mm256_madd_epi16(a, a));
  });
}

// Pairs of products of weights of four bits can be added as words eight times before they must
// become dwords, and of six bits twice: at best an addition for each multiplication.
void run_maddubs(size_t iterations) {
  __m256i a = _mm256_set1_epi8(3);
  run_chains<kChains, __m256i>(iterations, [a](__m256i acc) mutable {
    opaque(a);
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, a));
  });
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "avx2_fma", .required_isa = KTK_ISA_AVX2, .ops = kChains * 16, .run = run_fma},
    {.name = "avx2_madd",
     .act_bits = 16,
     .weight_bits = 8,
     .required_isa = KTK_ISA_AVX2,
     .ops = kChains * 32,
     .run = run_madd},
    {.name = "avx2_maddubs",
     .act_bits = 8,
     .weight_bits = 6,
     .required_isa = KTK_ISA_AVX2,
     .ops = kChains * 64,
     .run = run_maddubs},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {3, kUnits};
