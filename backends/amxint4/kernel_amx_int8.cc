// AMX-INT8: Sapphire Rapids and later servers.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/amx.h"
#include "codec/int4/variant.h"

namespace ktk::amxint4 {
namespace {

// Up to 12 rows wait for memory, or for the expansion of nibbles: the vector kernel does without
// (Emerald Rapids, a layer with 6, 8 and 12 rows an expert: 0.87, 0.89 and 1.04 of the time at
// best, 0.87, 0.90 and 0.91 by medians). Sums of a slab are exact in both and meet the same
// roundings, so the bits are the same.
struct Variant : AmxVariantOfDepth<int4::kTileDepth<amxint4::Act>> {
  using Weight = amxint4::WeightCodec;
  using Act = amxint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", 12, int4::gemm_vector<int4::Vnni512, Act, 12, 2>),
      ukernel("gemm_32x32_amx_int8", int4::gemm_amx<Act>, int4::amx_scratch_size<Act>),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)
