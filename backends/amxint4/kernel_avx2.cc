// Plain AVX2.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "common/int4/matmul.h"
#include "common/int4/variant.h"
#include "common/int4/words.h"

namespace ktk::amxint4 {
namespace {

using TargetAct = Act<int4::kWordsDepth>;

// Registers: 8 accumulators, 4 weights, a mask, a broadcast, products.
constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("gemv_1x32", 1, int4::multiply<int4::Words256, TargetAct, 1, 4>),
    make_ukernel("gemm_4x16", SIZE_MAX, int4::multiply<int4::Words256, TargetAct, 4, 2>),
};

}  // namespace
}  // namespace ktk::amxint4

extern "C" {
extern const ktk_variant KTK_VARIANT(amxint4);
constexpr ktk_variant KTK_VARIANT(amxint4) = ktk::int4::make_variant<ktk::amxint4::TargetAct>(
    ktk::amxint4::pack_weight, ktk::amxint4::kUkernels);
}
