// AVX-512 without VNNI (Skylake-X).
#include "codec/int4/tile.h"
#include "codec/int4/variant.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 20 accumulators, 4 weights, a mask, a broadcast, products.
struct Variant {
  using Weight = int4::WeightCodec;
  using Act = rawint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_10x32_avx512", int4::gemm_vector<int4::Maddubs512, Act, 10, 2>),
  };
};

}  // namespace
}  // namespace ktk::rawint4

KTK_EXPORT_VARIANT(rawint4, ktk::rawint4::Variant)
