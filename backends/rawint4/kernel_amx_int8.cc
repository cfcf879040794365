// AMX-INT8: Sapphire Rapids and later servers.
#include "codec/int4/amx.h"
#include "codec/int4/variant.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Tiles are half as deep as they could be, and wait for the expansion of nibbles and for sums: up
// to 24 rows the vector kernel takes less time (Emerald Rapids, a layer with 12, 16 and 24 rows an
// expert: 0.90, 0.84 and 0.88 of it, with 48 1.10). From there on avx512_vnni decodes to scratch,
// which would gain 5 % with 32 rows. Sums of a slab are exact in both and meet the same roundings,
// so the bits are the same.
struct Variant : AmxVariantOfDepth<int4::kTileDepth<rawint4::Act>> {
  using Weight = int4::WeightCodec;
  using Act = rawint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", 24, int4::gemm_vector<int4::Vnni512, Act, 12, 2>),
      ukernel("gemm_32x32_amx_int8", int4::gemm_amx<Act>, int4::amx_scratch_size<Act>),
  };
};

}  // namespace
}  // namespace ktk::rawint4

KTK_EXPORT_VARIANT(rawint4, ktk::rawint4::Variant)
