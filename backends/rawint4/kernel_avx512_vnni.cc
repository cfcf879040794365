// AVX-512 with vpdpbusd: Cascade Lake, Ice Lake and what follows on them, where splitting nibbles
// shares two ports with products.
#include "codec/int4/tile_decoded.h"
#include "codec/int4/variant.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 24 accumulators, 4 weights, a mask.
struct Variant {
  using Weight = int4::WeightCodec;
  using Act = rawint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", int4::kRowsNotDecoded,
              int4::gemm_vector<int4::Vnni512, Act, 12, 2>),
      ukernel("gemm_decoded_12x32_avx512_vnni", int4::gemm_decoded<int4::Vnni512, Act, 12, 2>,
              int4::decoded_scratch_size),
  };
};

}  // namespace
}  // namespace ktk::rawint4

KTK_EXPORT_VARIANT(rawint4, ktk::rawint4::Variant)
