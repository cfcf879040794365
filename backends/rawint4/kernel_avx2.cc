// Plain AVX2.
#include "codec/int4/tile.h"
#include "codec/int4/variant.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 8 accumulators, 4 weights, a mask, a broadcast, products.
struct Variant {
  using Weight = int4::WeightCodec;
  using Act = rawint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_1x32_avx2", 1, int4::gemm_vector<int4::Maddubs256, Act, 1, 4>),
      ukernel("gemm_4x16_avx2", int4::gemm_vector<int4::Maddubs256, Act, 4, 2>),
  };
};

}  // namespace
}  // namespace ktk::rawint4

KTK_EXPORT_VARIANT(rawint4, ktk::rawint4::Variant)
