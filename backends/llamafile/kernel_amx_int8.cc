// AMX-INT8: Sapphire Rapids and later servers, for more than a dozen rows of block types. Fewer are
// avx512_vnni, the same code: they wait for memory, or would wait for operands and sums.
#include "llamafile/amx.h"
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"

extern "C" {
extern const ktk_variant ktk_llamafile_avx512_vnni;
}

namespace ktk::llamafile {
namespace {

using Vectors =
    ByElement<ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni>;

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      Vectors::ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      Vectors::ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel("gemm_32x32_amx_int8", multiply_amx, amx_scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats>, AmxVariantOfDepth<kSubBlock> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_32x32_amx_int8"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
