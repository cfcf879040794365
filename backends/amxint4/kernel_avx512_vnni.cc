// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/matmul.h"
#include "codec/int4/variant.h"
#include "codec/int4/vnni512.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<>;

// Registers: 24 accumulators, 4 weights, a mask.
struct Variant {
  using Weight = amxint4::WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32", SIZE_MAX, int4::multiply<int4::Vnni512, TargetAct, 12, 2>),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)
