// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "common/int4/matmul.h"
#include "common/int4/variant.h"
#include "common/int4/vnni512.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<>;

// Registers: 24 accumulators, 4 weights, a mask.
constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("gemm_12x32", SIZE_MAX, int4::multiply<int4::Vnni512, TargetAct, 12, 2>),
};

}  // namespace
}  // namespace ktk::amxint4

extern "C" {
extern const ktk_variant KTK_VARIANT(amxint4);
constexpr ktk_variant KTK_VARIANT(amxint4) = ktk::int4::make_variant<ktk::amxint4::TargetAct>(
    ktk::amxint4::pack_weight, ktk::amxint4::kUkernels);
}
