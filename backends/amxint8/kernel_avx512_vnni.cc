// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "amxint8/matmul.h"
#include "amxint8/variant.h"
#include "amxint8/vnni512.h"

namespace ktk::amxint8 {
namespace {

using TargetAct = Act<ByteCodes, 256>;

// Registers: 24 accumulators, 2 weights, broadcasts.
struct Variant {
  using Weight = WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv", 12, multiply_thin<Vnni512, TargetAct, 12>),
      ukernel("gemm_2", 24, multiply<Vnni512, TargetAct, 12, 2, 4, prefetch_l2>),
      ukernel("gemm", SIZE_MAX, multiply<Vnni512, TargetAct, 12, 2, 8>),
  };
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)
