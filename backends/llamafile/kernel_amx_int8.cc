// AMX-INT8: Sapphire Rapids and later servers, for many rows of block types. Fewer are avx512_vnni,
// the same code: they wait for memory, or would wait for operands and for sums, which leave tiles
// once for each group.
#include "llamafile/amx.h"
#include "llamafile/by_element.h"
#include "llamafile/by_type.h"
#include "llamafile/floats/blocks_kernel.h"

extern "C" {
extern const ktk_variant ktk_llamafile_avx512_vnni;
}

namespace ktk::llamafile {
namespace {

using Vectors =
    ByElement<ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni>;

// Emerald Rapids, a layer with 24 rows an expert: avx512_vnni takes 0.76 (Q4_K) and 0.76 (Q8_0) of
// the time of tiles, with 32 rows 0.80 and 0.77, with 64 1.03 and 1.05, with 128 1.16. Of types
// with groups of 16 it takes 0.73 to 0.80 with 64 rows and 0.76 to 0.82 with 128.
constexpr size_t kVectorRows = 48;
constexpr ktk_ukernel kDecoded = Vectors::ukernel<2>("gemm_decoded_12x32_avx512_vnni", kVectorRows);

using ManyRows = ByType<[]<size_t kType>() -> TypeProduct {
  constexpr Kind kKind = kind_of(kTypes[kType]);
  if constexpr (num_groups(kKind.scaling) == 1) {
    return {gemm_amx<kKind>, GemmAmx<kKind>::scratch_size};
  } else {
    return {kDecoded.run, kDecoded.scratch_size};
  }
}>;

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      Vectors::ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      Vectors::ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      kDecoded,
      ukernel("gemm_32x32_amx_int8", ManyRows::run, ManyRows::scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats>, AmxVariantOfDepth<kSubBlock> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_decoded_12x32_avx512_vnni", kVectorRows),
      ukernel<3>("gemm_32x32_amx_int8"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
