// AVX-512 with vpdpbusd: Cascade Lake, Ice Lake and what follows on them, where instructions on
// 512-bit registers have two ports. Zen 4 and Zen 5 are avx512_bf16.
#include "llamafile/by_element.h"
#include "llamafile/by_type.h"
#include "llamafile/floats/blocks_kernel.h"
#include "llamafile/gemm.h"
#include "llamafile/gemm_decoded_i16.h"
#include "llamafile/gemv.h"

namespace ktk::llamafile {
namespace {

// More than kFewRows rows.
using Decoded = ByType<[]<size_t kType>() -> TypeProduct {
  constexpr BlockType kOf = kTypes[kType];
  constexpr Kind kKind = kind_of(kOf);
  if constexpr (fits_i16(kOf)) {
    return {gemm<GemmDecodedI16<kKind>>, GemmDecodedI16<kKind>::scratch_size};
  } else {
    using Kernel = GemmDecoded<kKind>;
    return {gemm<Kernel>, Kernel::scratch_size};
  }
}>;

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_2x32_avx512_vnni", kGemvRows, multiply_few),
      ukernel("gemm_12x32_avx512_vnni", kFewRows, multiply),
      ukernel("gemm_decoded_12x32_avx512_vnni", Decoded::run, Decoded::scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_decoded_12x32_avx512_vnni"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
