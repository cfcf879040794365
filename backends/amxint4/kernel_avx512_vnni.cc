// AVX-512 with vpdpbusd: Cascade Lake, Ice Lake and what follows on them, where splitting nibbles
// shares two ports with products.
#include "amxint4/layout.h"
#include "amxint4/weight.h"
#include "codec/int4/tile_decoded.h"
#include "codec/int4/variant.h"

namespace ktk::amxint4 {
namespace {

// Registers: 24 accumulators, 4 weights, a mask.
struct Variant {
  using Weight = amxint4::WeightCodec;
  using Act = amxint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", int4::kRowsNotDecoded,
              int4::gemm_vector<int4::Vnni512, Act, 12, 2>),
      ukernel("gemm_decoded_12x32_avx512_vnni", int4::gemm_decoded<int4::Vnni512, Act, 12, 2>,
              int4::decoded_scratch_size),
  };
};

}  // namespace
}  // namespace ktk::amxint4

KTK_EXPORT_VARIANT(amxint4, ktk::amxint4::Variant)
