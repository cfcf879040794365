// 512-bit vdpbf16ps. Half of the f32 FMA's speed on some CPUs and twice on others, so the limit of
// a bf16 variant is the better of the two (ktk/bench/limits.py).
#include <immintrin.h>

#include "probe/loop.h"
#include "probe/unit.h"

namespace {

constexpr int kChains = 16;

void run_bf16(size_t iterations) {
  __m512i bits = _mm512_set1_epi16(0x3f20);  // 0.625
  opaque(bits);
  run_chains<kChains, __m512>(iterations, [=](__m512 acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh)bits, (__m512bh)bits);
  });
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "avx512_bf16",
     .required_isa = KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_BF16,
     .ops = kChains * 64,
     .run = run_bf16},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {1, kUnits};
