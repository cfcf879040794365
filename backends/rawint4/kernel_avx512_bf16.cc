// AVX-512 with vpdpbusd on CPUs that also have vdpbf16ps, which this does not use: Zen 4 and Zen 5,
// where splitting nibbles has ports of its own, so that every tile does it again.
#include "codec/int4/tile.h"
#include "codec/int4/variant.h"
#include "rawint4/layout.h"

namespace ktk::rawint4 {
namespace {

// Registers: 24 accumulators, 4 weights, a mask.
struct Variant {
  using Weight = int4::WeightCodec;
  using Act = rawint4::Act;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_12x32_avx512_vnni", int4::gemm_vector<int4::Vnni512, Act, 12, 2>),
  };
};

}  // namespace
}  // namespace ktk::rawint4

KTK_EXPORT_VARIANT(rawint4, ktk::rawint4::Variant)
