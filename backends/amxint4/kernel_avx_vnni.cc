// AVX-VNNI, vpdpbusd on 256 bits: client CPUs without AVX-512.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/matmul.h"
#include "codec/int4/variant.h"
#include "codec/int4/vnni256.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<>;

// Registers: 8 accumulators, 4 weights, a mask, broadcasts.
struct Variant {
  using Weight = amxint4::WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_1x32", 1, int4::multiply<int4::Vnni256, TargetAct, 1, 4>),
      ukernel("gemm_4x16", SIZE_MAX, int4::multiply<int4::Vnni256, TargetAct, 4, 2>),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)
