// AVX-VNNI, vpdpbusd on 256 bits: client CPUs without AVX-512.
#include "common/int4/matmul.h"
#include "common/int4/variant.h"
#include "common/int4/vnni256.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 8 accumulators, 4 weights, a mask, broadcasts.
constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("gemv_1x32", 1, int4::multiply<int4::Vnni256, Act, 1, 4>),
    make_ukernel("gemm_4x16", SIZE_MAX, int4::multiply<int4::Vnni256, Act, 4, 2>),
};

}  // namespace
}  // namespace ktk::rawint4

extern "C" {
extern const ktk_variant KTK_VARIANT(rawint4);
constexpr ktk_variant KTK_VARIANT(rawint4) =
    ktk::int4::make_variant<ktk::rawint4::Act>(ktk::int4::pack_ready, ktk::rawint4::kUkernels);
}
