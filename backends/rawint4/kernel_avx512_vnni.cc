// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "common/int4/matmul.h"
#include "common/int4/variant.h"
#include "common/int4/vnni512.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 24 accumulators, 4 weights, a mask.
constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("gemm_12x32", SIZE_MAX, int4::multiply<int4::Vnni512, Act, 12, 2>),
};

}  // namespace
}  // namespace ktk::rawint4

extern "C" {
extern const ktk_variant KTK_VARIANT(rawint4);
constexpr ktk_variant KTK_VARIANT(rawint4) =
    ktk::int4::make_variant<ktk::rawint4::Act>(ktk::int4::pack_ready, ktk::rawint4::kUkernels);
}
