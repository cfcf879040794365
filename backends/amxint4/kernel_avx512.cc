// AVX-512 without VNNI (Skylake-X).
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/matmul.h"
#include "codec/int4/variant.h"
#include "codec/int4/words.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<int4::kWordsDepth>;

// Registers: 20 accumulators, 4 weights, a mask, a broadcast, products.
struct Variant {
  using Weight = amxint4::WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_10x32", SIZE_MAX, int4::multiply<int4::Words512, TargetAct, 10, 2>),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)
