// AMX-INT8: Sapphire Rapids and later servers. Few rows wait for memory, or for operands: weights
// are decoded as they are read.
#include "llamafile/amx.h"
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"
#include "llamafile/gemm.h"
#include "llamafile/gemv.h"

namespace ktk::llamafile {
namespace {

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_2x32_avx512_vnni", kGemvRows, multiply_few),
      ukernel("gemm_4x32_avx512_vnni", Dot::kMaxRows, multiply),
      ukernel("gemm_32x32_amx_int8", multiply_amx, amx_scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats>, AmxVariant {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_4x32_avx512_vnni", Dot::kMaxRows),
      ukernel<2>("gemm_32x32_amx_int8"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
