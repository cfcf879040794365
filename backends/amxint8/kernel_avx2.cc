// Plain AVX2: byte products through vpmaddwd on widened words, which is exact where vpmaddubsw
// would saturate. The specification of the layout for everybody else.
#include "amxint8/variant.h"
#include "amxint8/vector_kernel.h"
#include "simd/ymm.h"

namespace ktk::amxint8 {
namespace {

struct Words : Ymm {
  static constexpr size_t kLineProducts = 2;
  // Bytes widened to words: the even ones of each dword, then the odd ones.
  struct Weight {
    Int even, odd;
  };
  using Act = Weight;
  static Weight load_weight(const char* p) {
    const Int bytes = load_bytes(p);
    // Not a mask: its constant would be the seventeenth register.
    return {_mm256_srli_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srli_epi16(bytes, 8)};
  }
  static Act broadcast_act(const char* p) { return {broadcast(p), broadcast(p + 4)}; }
  static Int dot(Int sums, Weight w, Act a) {
    const Int sum = add(_mm256_madd_epi16(w.even, a.even), _mm256_madd_epi16(w.odd, a.odd));
    // sums + sum, but gcc 12 moves and spills accumulators that it may put elsewhere.
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(sum));
    return sums;
  }
};

// Registers: 8 accumulators, 4 halves of weights, 2 broadcasts, products.
struct Variant {
  using Weight = WeightCodec;
  using Act = ActWords<128>;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_4x16_avx2", gemm<VectorKernel<Words, Act, 4, 2>>)};
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)
