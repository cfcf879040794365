// AVX-512 without VNNI (Skylake-X).
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/tile.h"
#include "codec/int4/variant.h"

namespace ktk::amxint4 {
namespace {

// Registers: 20 accumulators, 4 weights, a mask, a broadcast, products.
struct Variant {
  using Weight = amxint4::WeightCodec;
  using Act = amxint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_10x32_avx512", int4::gemm_vector<int4::Maddubs512, Act, 10, 2>),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)
