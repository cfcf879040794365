// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "amxint8/variant.h"
#include "amxint8/vector_kernel.h"
#include "amxint8/vnni512.h"

namespace ktk::amxint8 {
namespace {

// Registers: 24 accumulators, 2 weights, broadcasts.
struct Variant {
  using Weight = WeightCodec;
  using Act = ActBytes<256>;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", gemm<VectorKernel<Vnni512, Act, 12, 12>>)};
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)
