// 256 bits: plain AVX2, and AVX-VNNI, which client CPUs without AVX-512 have.
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"
#include "llamafile/gemm.h"

namespace ktk::llamafile {
namespace {

constexpr char kName[] = "gemm_4x16_" KTK_STRING(KTK_TARGET);

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {ukernel(kName, multiply)};
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats> {
  static constexpr ktk_ukernel kUkernels[] = {ukernel<0>(kName)};
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
