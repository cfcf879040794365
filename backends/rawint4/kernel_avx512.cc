// AVX-512 without VNNI (Skylake-X).
#include "common/int4/matmul.h"
#include "common/int4/variant.h"
#include "common/int4/words.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 20 accumulators, 4 weights, a mask, a broadcast, products.
constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("gemm_10x32", SIZE_MAX, int4::multiply<int4::Words512, Act, 10, 2>),
};

}  // namespace
}  // namespace ktk::rawint4

extern "C" {
extern const ktk_variant KTK_VARIANT(rawint4);
constexpr ktk_variant KTK_VARIANT(rawint4) =
    ktk::int4::make_variant<ktk::rawint4::Act>(ktk::int4::pack_ready, ktk::rawint4::kUkernels);
}
